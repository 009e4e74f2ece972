"""Steps before the first request: what they need beside graphs is compiled and taken now, not on its way."""

import time

import structlog
import torch

from deltaplane_controlplane.ports import DevicePool
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.rank_pages import NO_ROWS, RankPageLayout
from deltaplane_kernels.side_pages import SideShape, side_page_layout
from deltaplane_server.adapters.packing import PackedAdapter
from deltaplane_server.execution.runner import ModelRunner
from deltaplane_server.scheduling.plan import NO_SLOT, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence

_SLOT = 0

log = structlog.get_logger(__name__)


def warm_up(
    runner: ModelRunner,
    pool: DevicePool | None,
    layout: AdapterLayout,
    dtype: torch.dtype,
    *,
    num_tokens: int,
    max_num_seqs: int,
) -> None:
    """Computes, in the first KV page, a prompt, a decode, and as many decodes as there may be, since kernels
    differ by whether these fill the device: of the base model, and of an adapter with parts outside the
    layers, for which others are launched; greedy and drawn.

    pool: of this layout and dtype, and empty, as it is afterwards; None where there are no adapters.
    num_tokens: of the longest sequence; at least 2, and at most those of a page.
    """
    begin = time.monotonic()
    _compute(runner, NO_SLOT, num_tokens, max_num_seqs)
    if pool is not None:
        adapter = _adapter(layout, dtype)
        pool.copy_in(_SLOT, range(len(adapter.pages)), adapter)
        _compute(runner, _SLOT, num_tokens, max_num_seqs)
        pool.clear(_SLOT)
    log.info("server.warm_up", seconds=round(time.monotonic() - begin, 1))


def _compute(runner: ModelRunner, slot: int, num_tokens: int, max_num_seqs: int) -> None:
    for temperature in (0.0, 1.0):
        prompt, *others = _sequences(num_tokens - 1, max_num_seqs, SamplingParams(temperature=temperature))
        _step(runner, [prompt], slot)
        for sequence in (prompt, *others):
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(0)
        _step(runner, [prompt], slot)
        _step(runner, [prompt, *others], slot)


def _sequences(num_prompt: int, max_num_seqs: int, sampling: SamplingParams) -> list[Sequence]:
    """Of the same tokens, in the same page."""
    stop = StopParams(max_tokens=2)
    return [
        Sequence(number, "warm-up", 0, [0] * num_prompt, num_prompt, sampling, stop, pages=[0])
        for number in range(max_num_seqs)
    ]


def _step(runner: ModelRunner, sequences: list[Sequence], slot: int) -> None:
    parts = [
        ScheduledSequence(s, s.num_computed, len(s.tokens) - s.num_computed, slot, samples=True)
        for s in sequences
    ]
    num_decodes = len(parts) if sequences[0].num_output else 0
    runner.submit(StepPlan(parts, num_decodes)).result()


def _adapter(layout: AdapterLayout, dtype: torch.dtype) -> PackedAdapter:
    """Zeros for the weights of one norm, and nothing else."""
    side = side_page_layout(layout)
    assert side is not None
    shape = SideShape(norms=tuple(side.outside.norms)[:1])
    ranked = RankPageLayout(layout)
    pages = torch.zeros(side.place(shape).num_pages, ranked.page_elements, dtype=dtype)
    rows = [[NO_ROWS] * ranked.slices_per_layer for _ in range(layout.num_layers)]
    return PackedAdapter(pages, rows, read_ms=0.0, pack_ms=0.0, side=shape)
