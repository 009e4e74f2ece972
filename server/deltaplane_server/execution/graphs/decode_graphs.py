"""CUDA graphs of steps of decodes: from the tokens to the likeliest ones that follow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.argmax import argmax
from deltaplane_server.execution.graphs.graph_set import GraphInputs, GraphSet, sizes_up_to
from deltaplane_server.execution.graphs.recorder import GraphRecorder
from deltaplane_server.models.decoder import DecoderInputs
from deltaplane_server.scheduling.plan import ScheduledSequence, StepPlan

_MAX_BATCH = 256
"""Larger batches keep a GPU busy for longer than their launches take."""


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes that get graphs: 1, 2, 4 and multiples of 8, up to one that holds max_num_seqs sequences."""
    return sizes_up_to([1, 2, 4, *range(8, _MAX_BATCH + 1, 8)], max_num_seqs)


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


class DecodeGraphs:
    """Graphs of a decoder's decode steps. Used by one thread at a time, on one stream."""

    def __init__(self, inputs: GraphInputs, recorder: GraphRecorder, *, max_num_seqs: int) -> None:
        """Captures them all. The feed of `inputs` holds the tokens of the largest batch."""
        decoder, sizes = inputs.decoder, batch_sizes(max_num_seqs)
        self._inputs = inputs
        self._logits = torch.zeros(
            sizes[-1], decoder.config.vocab_size, dtype=decoder.dtype, device=decoder.device
        )
        index = inputs.index_buffer(sizes[-1], sizes[-1], decodes_alone=True)
        self._graphs = GraphSet(inputs, index, sizes, self._compute, recorder)

    def holds(self, plan: StepPlan) -> bool:
        """Whether a step is one of decodes alone, and not too many."""
        return plan.num_decodes == len(plan.scheduled) <= self._graphs.sizes[-1]

    def run(self, scheduled: Sequence[ScheduledSequence]) -> DecodeOutput:
        """Starts a step of decodes on the current stream. Errors: as GraphSet.launch."""
        rows = slice(len(scheduled))
        self._graphs.launch(scheduled, len(scheduled))
        return DecodeOutput(self._graphs.tokens[rows], self._inputs.feed.drawn[rows], self._logits[rows])

    def _compute(self, inputs: DecoderInputs) -> None:
        decoder, rows = self._inputs.decoder, slice(len(inputs.tokens))
        hidden = decoder.forward(inputs, self._inputs.kv_cache.pages)
        logits = decoder.logits(hidden, out=self._logits[rows], side=inputs.side)
        argmax(logits, self._inputs.feed.drawn[rows])
