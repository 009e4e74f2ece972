"""Steps as CUDA graphs: one launch for what would be hundreds.

A graph is captured at start for each of a few numbers of rows, with LoRA and without; a step takes the
smallest one that holds it, and the rows left over are padding. What differs from step to step, tokens,
positions, KV pages and adapters, is read by the kernels from buffers that stay in their place, so a graph
serves any mix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from deltaplane_kernels.attention import FixedPlan
from deltaplane_kernels.attention_index import IndexBuffer
from deltaplane_kernels.lora_segments import Segments
from deltaplane_server.execution.graphs.recorder import GraphRecorder
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.step_inputs import segments, token_runs
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.models.decoder import Decoder, DecoderInputs, LoraStep
from deltaplane_server.scheduling.plan import ScheduledSequence

Compute = Callable[[DecoderInputs], None]


class GraphLoraPool(Protocol):
    """The adapters on the device."""

    def step(self, segments: Segments) -> LoraStep | None:
        """Sends the table of a step to the device, where the graphs read it (see LoraPool.step)."""
        ...

    def graph_step(self, num_tokens: int) -> LoraStep:
        """The deltas of whatever step of at most num_tokens rows was sent last."""
        ...


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """What graphs read and write beside their own memory.

    lora_pool: None serves the base model alone.
    """

    decoder: Decoder
    kv_cache: KVCache
    feed: TokenFeed
    lora_pool: GraphLoraPool | None

    def index_buffer(self, max_rows: int, max_sequences: int, *, decodes_alone: bool) -> IndexBuffer:
        layout = self.kv_cache.layout
        return IndexBuffer(
            max_rows,
            max_sequences,
            max_pages(self.decoder.config, layout.page_size),
            decodes_alone=decodes_alone,
            page_size=layout.page_size,
            num_kv_heads=layout.num_heads,
            device=self.decoder.device,
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The graphs of one number of rows, by whether they have LoRA, and what they were captured with."""

    attention: FixedPlan
    lora: LoraStep | None
    graphs: dict[bool, torch.cuda.CUDAGraph] = field(default_factory=dict)


class GraphSet:
    """Graphs of one computation, by number of rows. Used by one thread at a time, on one stream.

    sizes: the numbers of rows, rising.
    tokens: [sizes[-1]], int64, those that the last step went on from.
    """

    def __init__(
        self,
        inputs: GraphInputs,
        index: IndexBuffer,
        sizes: Sequence[int],
        compute: Compute,
        recorder: GraphRecorder,
    ) -> None:
        """Captures them all; no kernel is compiled and nothing is allocated after that.

        compute: computes a step, its rows of padding included, into memory that it may keep. index, and the
        feed of `inputs`: hold the largest step.
        """
        self.sizes = tuple(sizes)
        self.tokens = torch.zeros(sizes[-1], dtype=torch.int64, device=inputs.decoder.device)
        self._inputs = inputs
        self._index = index
        self._rows: dict[int, _Rows] = {}
        with recorder.recording():
            for size in reversed(self.sizes):
                self._capture(size, compute, recorder)

    def launch(self, scheduled: Sequence[ScheduledSequence], num_tokens: int) -> LoraStep | None:
        """Starts a step of num_tokens tokens, at most sizes[-1], on the current stream; returns its adapters.

        Errors: ValueError where the pages of a sequence do not hold its tokens; as TokenFeed.send.
        """
        size = smallest_above(self.sizes, num_tokens)
        rows, pool = self._rows[size], self._inputs.lora_pool
        lora = pool.step(segments(scheduled)) if pool is not None else None
        rows.attention.fill(token_runs(scheduled))
        self._inputs.feed.send(scheduled, size)
        rows.graphs[lora is not None].replay()
        return lora

    def _capture(self, size: int, compute: Compute, recorder: GraphRecorder) -> None:
        inputs, pool = self._inputs, self._inputs.lora_pool
        attention = FixedPlan(
            size, self._index, layout=inputs.kv_cache.layout, windows=inputs.decoder.config.windows
        )
        rows = self._rows[size] = _Rows(attention, None if pool is None else pool.graph_step(size))
        inputs.feed.send([], size)
        # Kernels are compiled for few rows and for many: these two sizes meet them all.
        warm_up = size in (self.sizes[0], self.sizes[-1])
        for with_lora in [False] if pool is None else [False, True]:
            lora = rows.lora if with_lora else None
            rows.graphs[with_lora] = recorder.record(
                partial(self._compute, size, attention, lora, compute), warm_up=warm_up
            )

    def _compute(self, size: int, attention: FixedPlan, lora: LoraStep | None, compute: Compute) -> None:
        tokens = self._inputs.feed.tokens(size, out=self.tokens[:size])
        compute(DecoderInputs(tokens, attention.index.positions, attention, lora))


def smallest_above(sizes: Sequence[int], number: int) -> int:
    """The smallest of `sizes` that is at least `number`."""
    return min(size for size in sizes if size >= number)


def sizes_up_to(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Those of rising `sizes` up to the first that is at least `largest`; all where none is."""
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < largest)


def max_pages(model: DecoderConfig, page_size: int) -> int:
    """KV pages of the longest sequence."""
    return -(-model.max_model_len // page_size)
