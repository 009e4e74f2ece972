"""Puts a model onto its device: weights, pages and graphs, in the memory that is planned for them."""

import time
from dataclasses import dataclass, replace

import structlog
import torch

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_server.adapters.adapter_pool import AdapterPool
from deltaplane_server.config import EngineConfig
from deltaplane_server.execution.graphs.graph_set import GraphInputs
from deltaplane_server.execution.graphs.step_graphs import StepGraphs, graph_bytes, max_graph_tokens
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.memory import MemoryPlan, MemoryShare, memory_budget, plan_memory
from deltaplane_server.execution.runner import ModelRunner
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.execution.warm_up import warm_up
from deltaplane_server.models.base_weights import DecoderWeights
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.models.decoder import Decoder, decoder_bytes
from deltaplane_server.models.weights import WeightSource
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig

_MIB = 1 << 20

_LIBRARY_BYTES = 512 * _MIB
"""Kernels of Triton and cuBLAS, the workspaces of cuBLAS, and what allocations are rounded up by."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Execution:
    """A model on its device, ready for steps.

    base: its weights, for adapters that are relative to them.
    scheduler: the limits that the model and the device's memory set.
    memory: what was handed out.
    """

    runner: ModelRunner
    pool: AdapterPool
    base: DecoderWeights
    scheduler: SchedulerConfig
    memory: MemoryPlan


def set_up(
    config: EngineConfig,
    model: DecoderConfig,
    weights: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
) -> Execution:
    """Takes all the memory that serving will need.

    Errors: InvalidArgumentError where it does not fit, or where the weights do not fit the model.
    """
    num_rank_pages, _ = _pool_size(config)
    layout = model.adapter_layout()
    limits = SchedulerConfig.of(config, max_model_len=model.max_model_len, num_pages=1)
    max_tokens = _max_tokens(config, limits, device)
    memory = plan_memory(
        config,
        model,
        memory_budget(config, device),
        weight_bytes=decoder_bytes(model, weights, dtype, device),
        adapter_bytes=num_rank_pages * RankPageLayout(layout).page_bytes(dtype),
        dtype=dtype,
        others=(
            _cuda_shares(config, model, limits, dtype, device)
            if device.type == "cuda"
            else _cpu_shares(config, layout)
        ),
    )
    _announce(memory, dtype, device)
    decoder = Decoder(model, weights, dtype, device)
    pool = _make_pool(config, layout, dtype, device, max_tokens)
    kv_cache = KVCache(
        model, num_pages=memory.num_kv_pages, page_size=config.page_size, dtype=dtype, device=device
    )
    feed = TokenFeed(max_tokens, max_tokens, device)
    runner = _make_runner(config, limits, decoder, kv_cache, feed, pool if config.enable_lora else None)
    weights.finish()  # on a GPU they have come in while kernels were compiled and graphs captured
    if device.type == "cuda":
        warm_up(
            runner,
            pool if config.enable_lora else None,
            layout,
            dtype,
            num_tokens=min(config.page_size, model.max_model_len),
            max_num_seqs=config.max_num_seqs,
        )
    return Execution(
        runner=runner,
        pool=pool,
        base=DecoderWeights(decoder),
        scheduler=replace(limits, num_pages=memory.num_kv_pages),
        memory=memory,
    )


def uses_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps run as CUDA graphs."""
    return device.type == "cuda" and not config.enforce_eager


def _max_tokens(config: EngineConfig, limits: SchedulerConfig, device: torch.device) -> int:
    """The most rows of a step, those of padding included."""
    if not uses_graphs(config, device):
        return limits.max_step_tokens
    return max(limits.max_step_tokens, max_graph_tokens(config.max_num_seqs, limits.max_step_tokens))


def _make_pool(
    config: EngineConfig, layout: AdapterLayout, dtype: torch.dtype, device: torch.device, max_tokens: int
) -> AdapterPool:
    num_pages, num_slots = _pool_size(config)
    if not config.enable_lora:  # an empty pool needs no kernels
        return AdapterPool(RankPagePool(layout, num_pages, num_slots, dtype))
    try:
        return AdapterPool(
            RankPagePool(
                layout, num_pages, num_slots, dtype, device, max_tokens, max_blends=config.max_num_seqs
            )
        )
    except ValueError as error:
        raise InvalidArgumentError.for_field(
            "enable_lora", f"adapters of this model cannot be served on {device}: {error}; serve it without"
        ) from error


def _make_runner(
    config: EngineConfig,
    limits: SchedulerConfig,
    decoder: Decoder,
    kv_cache: KVCache,
    feed: TokenFeed,
    pool: AdapterPool | None,
) -> ModelRunner:
    device = decoder.device
    if not uses_graphs(config, device):
        return ModelRunner(decoder, kv_cache, feed, pool)
    begin, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    graphs = StepGraphs.capture(
        GraphInputs(decoder, kv_cache, feed, pool),
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=limits.max_step_tokens,
    )
    taken = free - torch.cuda.mem_get_info(device)[0]
    log.info("server.graphs", seconds=round(time.monotonic() - begin, 1), taken=f"{taken / _MIB:.0f} MiB")
    return ModelRunner(decoder, kv_cache, feed, pool, graphs)


def _cpu_shares(config: EngineConfig, layout: AdapterLayout) -> list[MemoryShare]:
    """What a CPU needs beside weights, pages and a step's workspace: the matrices of resident adapters as its
    products take them, in float32, each in one piece."""
    if not config.enable_lora:
        return []
    num_pages, _ = _pool_size(config)
    page_bytes = RankPageLayout(layout).page_bytes(torch.float32)
    return [MemoryShare("adapter matrices", num_pages * page_bytes)]


def _cuda_shares(
    config: EngineConfig,
    model: DecoderConfig,
    limits: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MemoryShare]:
    """What a GPU needs beside weights, pages and a step's workspace."""
    shares = [MemoryShare("libraries", _LIBRARY_BYTES)]
    if uses_graphs(config, device):
        graphs = graph_bytes(
            model,
            config.max_num_seqs,
            limits.max_step_tokens,
            config.page_size,
            dtype,
            with_lora=config.enable_lora,
        )
        shares.append(MemoryShare("graphs", graphs))
    if config.enable_lora:
        from deltaplane_kernels.lora_cuda import partial_elements
        from deltaplane_kernels.lora_slots import MAX_RANK

        if config.max_lora_rank > MAX_RANK:
            raise InvalidArgumentError.for_field(
                "max_lora_rank", f"{config.max_lora_rank} is above {MAX_RANK}, the highest on a GPU; lower it"
            )
        max_tokens = _max_tokens(config, limits, device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        layout = RankPageLayout(model.adapter_layout())
        shares.append(MemoryShare("adapter workspace", 4 * partial_elements(layout, max_tokens, processors)))
    return shares


def _pool_size(config: EngineConfig) -> tuple[int, int]:
    """Rank pages and slots."""
    if not config.enable_lora:
        return 0, 0
    return config.num_adapter_pages, config.max_loras


def _announce(memory: MemoryPlan, dtype: torch.dtype, device: torch.device) -> None:
    shares = {share.purpose.replace(" ", "_"): f"{share.nbytes / _MIB:.0f} MiB" for share in memory.shares}
    log.info("server.memory", device=str(device), dtype=str(dtype).removeprefix("torch."), **shares)
