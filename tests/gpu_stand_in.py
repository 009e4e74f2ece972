"""The path of a GPU without one: a runner whose ops launch Triton kernels that are never compiled nor run.

Triton itself tells what it would compile for: a driver of no GPU stands behind it, and a hook of its cache
declines. All that the ops allocate is there, as large and as aligned as on a GPU. Kernels of LoRA in the
layers, and products of cuBLAS, are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from bench.random_model import TINY, RandomWeights
from deltaplane_kernels import (
    activation_triton,
    argmax_triton,
    attention_index,
    lora_norm_cuda,
    norm_triton,
    rotary_triton,
    sampling_triton,
)
from deltaplane_kernels.attention import AttentionPlan, KVLayout, TokenRun
from deltaplane_kernels.attention_index import build_index
from deltaplane_kernels.linear import BaseProduct, Linear
from deltaplane_kernels.lora_segments import Segments
from deltaplane_kernels.norm import NormWeight
from deltaplane_kernels.sampling import Draws
from deltaplane_kernels.side import SideStep
from deltaplane_kernels.side_cuda import TableSideStep
from deltaplane_kernels.side_pages import side_page_layout
from deltaplane_kernels.side_tables import SideTables
from deltaplane_server.execution import sampler, step_inputs
from deltaplane_server.execution.graphs import decode_graphs
from deltaplane_server.execution.graphs.decode_graphs import DecodeGraphs
from deltaplane_server.execution.graphs.graph_set import GraphInputs
from deltaplane_server.execution.graphs.prompt_graphs import PromptGraphs
from deltaplane_server.execution.graphs.recorder import GraphRecorder
from deltaplane_server.execution.graphs.step_graphs import StepGraphs, max_graph_tokens
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.runner import ModelRunner
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.execution.warm_up import warm_up
from deltaplane_server.models import decoder as decoder_module
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.models.decoder import Decoder
from deltaplane_server.models.rope import Rope
from deltaplane_server.scheduling.plan import NO_SLOT, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence

CPU = torch.device("cpu")
PROCESSORS = 132
MAX_SEQS, MAX_TOKENS, MODEL_LEN = 300, 2000, 2048
PAGE, DTYPE = 16, torch.bfloat16
PLAIN, WITH_SIDE = 0, 1
"""Slots: of an adapter of the layers' linears alone, and of one with parts outside them."""

ROUND = replace(TINY, max_model_len=MODEL_LEN, qk_norm=True, windows=(None, 40))
ODD = replace(
    ROUND,
    vocab_size=521,
    hidden_size=60,
    intermediate_size=100,
    num_heads=6,
    num_kv_heads=1,
    head_dim=20,
    rope=Rope((0.5,) * 10, 1.0),
)
"""Tensors of an odd number of its rows are no multiple of 16 bytes."""

Key = tuple[str, str]
"""A kernel, and what it is compiled for."""


class NoGpu:
    """Triton's driver of a GPU that is not there; what is noted for it is noted for no other device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "none"

    def get_current_stream(self, device: str) -> int:
        return 0


def stand_in(monkeypatch: pytest.MonkeyPatch) -> set[Key]:
    """Puts ops on the GPU's path. Returns what they have launched since it was last cleared."""
    keys: set[Key] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        keys.add((f"{fn.module.rpartition('.')[2]}.{fn.name}", key))
        return True  # as compiled elsewhere: nothing is launched

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns of a default
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    monkeypatch.setattr(triton.runtime.driver, "_active", NoGpu())
    monkeypatch.setattr(attention_index, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(step_inputs, "AttentionPlan", IndexedPlan)
    monkeypatch.setattr(decoder_module, "silu_mul", activation_triton.silu_mul)
    monkeypatch.setattr(decoder_module, "rms_norm", norm_triton.rms_norm)
    monkeypatch.setattr(decoder_module, "add_rms_norm", norm_triton.add_rms_norm)
    monkeypatch.setattr(decoder_module, "rotary_factors", rotary_triton.rotary_factors)
    monkeypatch.setattr(Linear, "__call__", zeros_of_linear)
    monkeypatch.setattr(decode_graphs, "argmax", first_of_each)
    monkeypatch.setattr(sampler, "draw", draw_first)
    return keys


def zeros_of_linear(linear: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
    """As Linear, whose products are not Triton's: zeros."""
    return x.new_zeros(len(x), linear.out_features) if out is None else out.zero_()


def first_of_each(logits: Tensor, out: Tensor) -> Tensor:
    """As argmax, whose kernels do not run: token 0."""
    return argmax_triton.argmax(logits, out).zero_()


def draw_first(logits: Tensor, draws: Draws) -> Tensor:
    """As sampling.draw, whose kernels do not run: token 0."""
    return sampling_triton.draw(logits, draws).zero_()


class IndexedPlan(AttentionPlan):
    """As on a GPU."""

    def __init__(
        self,
        runs: Sequence[TokenRun],
        *,
        layout: KVLayout,
        windows: Iterable[int | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.num_tokens = sum(run.num_tokens for run in runs)
        self.windows = frozenset(windows)
        self.index = build_index(
            runs, page_size=layout.page_size, num_kv_heads=layout.num_heads, device=device
        )


class TablePool:
    """A pool of two slots whose side ops are those of a GPU; what is in the slots is nowhere read."""

    def __init__(self, model: DecoderConfig, max_tokens: int) -> None:
        layout = side_page_layout(model.adapter_layout())
        assert layout is not None
        pages = torch.zeros(2, layout.page_elements, dtype=DTYPE)
        self.num_slots, self.num_pages, self.page_bytes = 2, len(pages), pages[0].nbytes
        self._tables = SideTables.empty(layout, pages, self.num_slots)
        self._slots = torch.full((max_tokens,), NO_SLOT, dtype=torch.int32)
        self._with_side = {WITH_SIDE}

    def copy_in(self, slot: int, pages: Sequence[int], adapter: Any) -> None:
        if adapter.side:
            self._with_side.add(slot)

    def clear(self, slot: int) -> None:
        self._with_side.remove(slot)

    def step(self, segments: Segments) -> "TableStep | None":
        slots = {slot for slot, _ in segments} - {NO_SLOT}
        num_rows = sum(count for _, count in segments)
        if not slots:
            return None
        return self.graph_step(num_rows) if slots & self._with_side else TableStep(None)

    def graph_step(self, num_tokens: int) -> "TableStep":
        return TableStep(TableSideStep(self._tables, self._slots[:num_tokens]))


@dataclass(frozen=True)
class TableStep:
    side: SideStep | None

    def base_product(self, layer: int, linear: str, x: Tensor, base: BaseProduct) -> Tensor:
        return base(x)

    def add_delta(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None:
        pass

    def add_delta_rms_norm(
        self, layer: int, linear: str, x: Tensor, y: Tensor, residual: Tensor, weight: NormWeight, eps: float
    ) -> Tensor:
        if len(y) <= lora_norm_cuda.MAX_ROWS:  # in a kernel of LoRA
            return torch.empty_like(residual)
        return norm_triton.add_rms_norm(y, residual, weight, eps)


class Captured:
    """A graph: its replay launches what was captured, and compiles nothing."""

    def replay(self) -> None:
        pass


class OnceRecorder(GraphRecorder):
    """Captures without a GPU."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def record(self, compute: Callable[[], None], *, warm_up: bool) -> Any:
        compute()
        return Captured()


@torch.inference_mode()
def start(model: DecoderConfig, *, with_graphs: bool, with_lora: bool) -> ModelRunner:
    """A runner after all that setup.set_up() does with one on a GPU."""
    decoder = Decoder(model, RandomWeights(model, DTYPE), DTYPE, CPU)
    cache = KVCache(model, num_pages=1, page_size=PAGE, dtype=DTYPE, device=CPU)
    most = max(MAX_TOKENS, max_graph_tokens(MAX_SEQS, MAX_TOKENS))
    feed = TokenFeed(most, most, CPU)
    pool = TablePool(model, most) if with_lora else None
    graphs = None
    if with_graphs:
        inputs, recorder = GraphInputs(decoder, cache, feed, pool), OnceRecorder()
        prompts = PromptGraphs(inputs, recorder, max_num_seqs=MAX_SEQS, max_step_tokens=MAX_TOKENS)
        graphs = StepGraphs(DecodeGraphs(inputs, recorder, max_num_seqs=MAX_SEQS), prompts)
    runner = ModelRunner(decoder, cache, feed, pool, graphs)
    layout = model.adapter_layout()
    warm_up(runner, pool, layout, DTYPE, num_tokens=PAGE, max_num_seqs=MAX_SEQS)
    return runner


SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=1, seed=3),
    SamplingParams(top_k=100_000, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(logprobs=20, logit_bias={5: 2.0}),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.3),
)
STOPS = (StopParams(max_tokens=9), StopParams(max_tokens=9, min_tokens=4, eos_token_ids=frozenset({2, 7})))


@dataclass(frozen=True)
class Part:
    """So many tokens of a sequence after others whose KV is there."""

    start: int
    num_tokens: int
    samples: bool = True


def decodes(number: int, context: int) -> list[Part]:
    return [Part(context, 1)] * number


def plan_of(parts: Sequence[Part], slots: Sequence[int], number: int) -> StepPlan:
    """slots: that the sequences take in turn, as they do the ways to draw, from this number on."""
    scheduled = []
    for i, part in enumerate(parts):
        end = part.start + part.num_tokens
        sampling, stop = SAMPLING[(number + i) % len(SAMPLING)], STOPS[(number + i) % len(STOPS)]
        sequence = TokenSequence(i, "", 0, [0] * end, end, sampling, stop, pages=[0] * -(-end // PAGE))
        slot = slots[i % len(slots)]
        scheduled.append(ScheduledSequence(sequence, part.start, part.num_tokens, slot, part.samples))
    num_decodes = sum(part.num_tokens == 1 and part.start > 0 for part in parts)
    return StepPlan(scheduled, num_decodes)


def compute(runner: ModelRunner, plan: StepPlan) -> None:
    runner.submit(plan).result()
    for part in plan.scheduled:
        runner.forget(part.sequence)
