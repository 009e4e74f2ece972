"""Decode steps as CUDA graphs: one launch for what would be hundreds.

A graph is captured at start for each of a few batch sizes, with LoRA and without; a step takes the smallest
one that holds it, and the rows left over are padding. What differs from step to step, tokens, positions, KV
pages and adapters, is read by the kernels from buffers that stay in their place, so a graph serves any mix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltaplane_kernels.argmax import argmax
from deltaplane_kernels.attention import DecodePlan
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.step_inputs import segments, token_runs
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.models.decoder import Decoder, DecoderInputs, LoraStep
from deltaplane_server.scheduling.plan import ScheduledSequence, StepPlan

_MAX_BATCH = 256
"""Larger batches keep a GPU busy for longer than their launches take."""

_GRAPH_BYTES = 12 << 20
"""Device memory that the driver takes for a graph, generously."""

_SPLIT_ROWS = 640
"""At least so many partial results has a decode whose keys are shared out (see kernels.attention_index)."""


class GraphLoraPool(Protocol):
    """The adapters on the device."""

    def step(self, segments: Sequence[tuple[int, int]]) -> LoraStep | None:
        """Sends the table of a step to the device, where the graphs read it (see LoraPool.step)."""
        ...

    def graph_step(self, num_tokens: int) -> LoraStep:
        """The deltas of whatever step of at most num_tokens rows was sent last."""
        ...


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes that get graphs: 1, 2, 4 and multiples of 8, up to one that holds max_num_seqs sequences."""
    largest = min(max_num_seqs, _MAX_BATCH)
    sizes = [1, 2, 4, *range(8, _MAX_BATCH + 1, 8)]
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < largest)


def graph_bytes(
    model: DecoderConfig, max_num_seqs: int, page_size: int, dtype: torch.dtype, *, with_lora: bool
) -> int:
    """The most memory that DecodeGraphs take: graphs, inputs and outputs, partial results of attention, and
    what the largest batch computes, which the smaller ones share."""
    sizes = batch_sizes(max_num_seqs)
    q_size = model.num_heads * model.head_dim
    max_pages = -(-model.max_model_len // page_size)
    plans = sum(4 * size * max_pages + 4 * q_size * max(4 * size, _SPLIT_ROWS) for size in sizes)
    logits = sizes[-1] * model.vocab_size * dtype.itemsize
    activations = sizes[-1] * (8 * model.hidden_size + 8 * q_size + 4 * model.intermediate_size)
    graphs = len(sizes) * (1 + with_lora) * _GRAPH_BYTES
    return plans + logits + activations * dtype.itemsize + graphs


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Of B rows, good until the next decode.

    inputs: [B], int64, the tokens that the step went on from.
    likeliest: [B], int64, which are also the first of the feed's drawn ones.
    logits: [B, vocab_size], of the decoder's dtype.
    """

    inputs: Tensor
    likeliest: Tensor
    logits: Tensor

    def first(self, num_rows: int) -> "DecodeOutput":
        return DecodeOutput(self.inputs[:num_rows], self.likeliest[:num_rows], self.logits[:num_rows])


@dataclass(frozen=True, slots=True)
class _Batch:
    """The inputs and outputs of the graphs of one batch size, and the graphs by whether they have LoRA."""

    attention: DecodePlan
    lora: LoraStep | None
    output: DecodeOutput
    graphs: dict[bool, torch.cuda.CUDAGraph]


class DecodeGraphs:
    """Graphs of a decoder's decode steps. Used by one thread at a time, on one stream."""

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        feed: TokenFeed,
        lora_pool: GraphLoraPool | None,
        *,
        max_num_seqs: int,
    ) -> None:
        """Captures them all; no kernel is compiled and nothing is allocated after that.

        feed: holds the tokens of the largest batch.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._feed = feed
        self._lora_pool = lora_pool
        sizes = batch_sizes(max_num_seqs)
        device, vocab_size = decoder.device, decoder.config.vocab_size
        self._output = DecodeOutput(
            torch.zeros(sizes[-1], dtype=torch.int64, device=device),
            feed.drawn,
            torch.zeros(sizes[-1], vocab_size, dtype=decoder.dtype, device=device),
        )
        self._batches: dict[int, _Batch] = {}
        self._capture(sizes)

    def holds(self, plan: StepPlan) -> bool:
        """Whether a step is one of decodes alone, and not too many."""
        return plan.num_decodes == len(plan.scheduled) <= max(self._batches)

    def run(self, scheduled: Sequence[ScheduledSequence]) -> DecodeOutput:
        """Starts a step of decodes on the current stream.

        Errors: ValueError where the pages of a sequence do not hold its tokens; as TokenFeed.send.
        """
        num_rows = len(scheduled)
        size = min(size for size in self._batches if size >= num_rows)
        batch = self._batches[size]
        with_lora = self._lora_pool is not None and self._lora_pool.step(segments(scheduled)) is not None
        batch.attention.fill(token_runs(scheduled))
        self._feed.send(scheduled, size)
        batch.graphs[with_lora].replay()
        return batch.output.first(num_rows)

    def _capture(self, sizes: Sequence[int]) -> None:
        """The largest first: the others then do with the memory that it took."""
        device = self._decoder.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for size in reversed(sizes):
                batch = self._batches[size] = self._make_batch(size)
                batch.attention.fill([])
                self._feed.send([], size)
                for with_lora in [False] if self._lora_pool is None else [False, True]:
                    self._compute(batch, with_lora)  # compiles kernels, and takes workspaces
                    graph = batch.graphs[with_lora] = torch.cuda.CUDAGraph()
                    # torch.cuda.graph() would first give all cached memory, pinned too, back to the driver.
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    try:
                        self._compute(batch, with_lora)
                    finally:
                        graph.capture_end()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the graphs have taken is in a pool of their own

    def _make_batch(self, size: int) -> _Batch:
        config, layout = self._decoder.config, self._kv_cache.layout
        attention = DecodePlan(
            size,
            -(-config.max_model_len // layout.page_size),
            layout=layout,
            windows=config.windows,
            device=self._decoder.device,
        )
        lora = self._lora_pool.graph_step(size) if self._lora_pool is not None else None
        return _Batch(attention, lora, self._output.first(size), {})

    def _compute(self, batch: _Batch, with_lora: bool) -> None:
        assert batch.attention.index is not None
        output = batch.output
        inputs = DecoderInputs(
            self._feed.tokens(len(output.inputs), out=output.inputs),
            batch.attention.index.positions,
            batch.attention,
            batch.lora if with_lora else None,
        )
        hidden = self._decoder.forward(inputs, self._kv_cache.pages)
        self._decoder.logits(hidden, out=output.logits)
        argmax(output.logits, output.likeliest)
