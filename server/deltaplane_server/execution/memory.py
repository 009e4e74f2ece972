"""Who gets how much of the device's memory: decided once, at start, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.config import EngineConfig
from deltaplane_server.execution.host_memory import available_memory
from deltaplane_server.execution.kv_cache import kv_page_bytes
from deltaplane_server.models.config import DecoderConfig

GIB = 1 << 30

_LOGIT_BYTES = 16
"""For each logit of a step: it, in the model's dtype and in float32, and its log-probability, being made."""

_SORTED_LOGIT_BYTES = 64
"""The same, and what a truncated draw in torch sorts where the whole vocabulary may be drawn: scores three
times, their order, and weights in float64 with their cumulative sums."""


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """What a part of the device's memory is for, in bytes."""

    purpose: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """shares: weights, KV pages, adapter pages and workspace, in this order, and what else the device needs;
    a table for people."""

    num_kv_pages: int
    shares: tuple[MemoryShare, ...]

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.shares)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What the plan may hand out.

    usable: bytes.
    kv_fraction, kv_limit: unless a size is asked for, KV pages get this fraction of what the rest leaves,
        and at most so many bytes.
    in_torch: whether ops are those of CPUs: attention copies one layer's pages together, padded at most
        twofold, and has masks; deltas of adapters are formed before they are added; draws sort.
    """

    usable: int
    kv_fraction: float
    kv_limit: int
    in_torch: bool


def memory_budget(engine: EngineConfig, device: torch.device) -> MemoryBudget:
    """What the device offers now.

    On a CPU: the memory that is available; half of it stays with the host cache of adapters and the system.
    On a GPU: gpu_memory_utilization of the total, as far as it is free.
    """
    if device.type == "cpu":
        return MemoryBudget(available_memory(), kv_fraction=0.5, kv_limit=GIB, in_torch=True)
    free, total = torch.cuda.mem_get_info(device)
    usable = min(free, int(total * engine.gpu_memory_utilization))
    return MemoryBudget(usable, kv_fraction=1.0, kv_limit=usable, in_torch=False)


def plan_memory(
    engine: EngineConfig,
    model: DecoderConfig,
    budget: MemoryBudget,
    *,
    weight_bytes: int,
    adapter_bytes: int,
    dtype: torch.dtype,
    others: Sequence[MemoryShare] = (),
) -> MemoryPlan:
    """Weights, adapter pages and workspace come first; KV pages get kv_cache_bytes, or what the rest allows.

    weight_bytes: see models.decoder.decoder_bytes.
    others: what the device needs beside these.
    Errors: InvalidArgumentError when it does not fit: what is there, what it takes, how to mend it.
    """
    page_bytes = kv_page_bytes(model, engine.page_size, dtype)
    gather_bytes = 2 * page_bytes // model.num_layers if budget.in_torch else 0
    workspace = _workspace_bytes(engine, model, dtype, in_torch=budget.in_torch)
    room = budget.usable - weight_bytes - adapter_bytes - workspace - sum(share.nbytes for share in others)
    num_pages = _num_kv_pages(engine, model, budget, page_bytes, page_bytes + gather_bytes, room)
    plan = MemoryPlan(
        num_pages,
        (
            MemoryShare("weights", weight_bytes),
            MemoryShare("KV pages", num_pages * page_bytes),
            MemoryShare("adapter pages", adapter_bytes),
            MemoryShare("workspace", workspace + num_pages * gather_bytes),
            *others,
        ),
    )
    if plan.nbytes > budget.usable:
        raise _too_little(engine, budget, plan)
    return plan


def _num_kv_pages(
    engine: EngineConfig, model: DecoderConfig, budget: MemoryBudget, page_bytes: int, cost: int, room: int
) -> int:
    """At least 1, which may be more than fits. cost: bytes that a page takes with all that comes with it."""
    if engine.kv_cache_bytes is not None:
        if engine.kv_cache_bytes < page_bytes:
            raise InvalidArgumentError.for_field(
                "kv_cache_bytes",
                f"{engine.kv_cache_bytes} bytes hold no KV page of {engine.page_size} tokens; give at least "
                f"{page_bytes}",
            )
        return engine.kv_cache_bytes // page_bytes
    pages = min(int(room * budget.kv_fraction), budget.kv_limit) // cost
    if not engine.enable_prefix_caching:
        pages = min(pages, engine.max_num_seqs * -(-model.max_model_len // engine.page_size))
    return max(pages, 1)


def _workspace_bytes(
    engine: EngineConfig, model: DecoderConfig, dtype: torch.dtype, *, in_torch: bool
) -> int:
    """The most that one step takes beside weights and pages: a layer's activations, masks, deltas, logits.
    Adapters and graphs on a GPU have workspaces of their own."""
    tokens = engine.max_num_batched_tokens
    if not engine.enable_chunked_prefill:  # see SchedulerConfig.max_step_tokens
        tokens = max(tokens, model.max_model_len + engine.max_num_seqs)
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Residual, input and output of a block; packed q, k, v and their rotation; gate, up and their product.
    row = 5 * model.hidden_size + 4 * q_size + 4 * kv_size + 4 * model.intermediate_size
    token_bytes = row * dtype.itemsize + model.hidden_size * 4
    if in_torch:
        token_bytes += len(set(model.windows)) * model.max_model_len * dtype.itemsize
        token_bytes += _delta_bytes(engine, model, dtype) if engine.enable_lora else 0
    logit_bytes = _SORTED_LOGIT_BYTES if in_torch else _LOGIT_BYTES
    return tokens * token_bytes + engine.max_num_seqs * model.vocab_size * logit_bytes


def _delta_bytes(engine: EngineConfig, model: DecoderConfig, dtype: torch.dtype) -> int:
    """Of a token, for the delta of the widest packed linear: its rows of x and y, gathered; in float32, x and
    A x, and for a slice the delta, y and their sum."""
    ranks = 3 * engine.max_lora_rank
    return max(
        (linear.in_features + linear.out_features) * dtype.itemsize
        + (linear.in_features + ranks + 3 * max(part.out_features for part in linear.slices)) * 4
        for linear in model.adapter_layout().linears
    )


def _too_little(engine: EngineConfig, budget: MemoryBudget, plan: MemoryPlan) -> InvalidArgumentError:
    table = ", ".join(f"{share.purpose} {_gib(share.nbytes)}" for share in plan.shares)
    what = f"{_gib(plan.nbytes)} are needed ({table}), {_gib(budget.usable)} are available"
    if engine.kv_cache_bytes is not None:
        return InvalidArgumentError.for_field("kv_cache_bytes", f"more KV than memory: {what}; ask for less")
    return InvalidArgumentError(
        f"The model does not fit in memory: {what}; use a smaller model or dtype, fewer or smaller adapters "
        "(max_loras, max_lora_rank, adapter_pages), or a lower max_num_batched_tokens or max_num_seqs"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
