"""CUDA graphs of steps that have prompts in them, or chunks of these: from the tokens to hidden states.

Such a step is of any number of tokens, and few of its rows draw one: their logits and the draw are launched
kernel by kernel after the graph, while that computes.
"""

from collections.abc import Sequence

import torch

from deltaplane_server.execution.graphs.graph_set import GraphInputs, GraphSet, sizes_up_to
from deltaplane_server.execution.graphs.recorder import GraphRecorder
from deltaplane_server.execution.step_inputs import StepOutput
from deltaplane_server.models.decoder import DecoderInputs
from deltaplane_server.scheduling.plan import ScheduledSequence, StepPlan

_SIZES = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
"""Numbers of rows that cuBLAS has fast products for: on an H200 a step of Llama-3-8B takes 4.5, 5.0, 6.0,
6.5, 7.8, 9.3, 11.4, 13.3, 17.5 and 20.5 ms, where one of 448 rows takes 14.5 and one of 896 20.1. Longer
steps keep a GPU busy for longer than their launches take."""


def step_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that get graphs, up to one that holds max_step_tokens of them."""
    return sizes_up_to(_SIZES, max_step_tokens)


class PromptGraphs:
    """Graphs of a decoder's steps of any kind. Used by one thread at a time, on one stream."""

    def __init__(
        self, inputs: GraphInputs, recorder: GraphRecorder, *, max_num_seqs: int, max_step_tokens: int
    ) -> None:
        """Captures them all. The feed of `inputs` holds the tokens of the largest size."""
        decoder, sizes = inputs.decoder, step_sizes(max_step_tokens)
        self._inputs = inputs
        self._hidden = torch.zeros(
            sizes[-1], decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device
        )
        index = inputs.index_buffer(sizes[-1], min(max_num_seqs, sizes[-1]), decodes_alone=False)
        self._graphs = GraphSet(inputs, index, sizes, self._compute, recorder)

    def holds(self, plan: StepPlan) -> bool:
        """Whether a step is short enough."""
        return plan.num_tokens <= self._graphs.sizes[-1]

    def run(self, scheduled: Sequence[ScheduledSequence]) -> StepOutput:
        """Starts a step on the current stream. Errors: as GraphSet.launch."""
        num_tokens = sum(part.num_tokens for part in scheduled)
        lora = self._graphs.launch(scheduled, num_tokens)
        side = lora.side if lora is not None else None
        return StepOutput(self._graphs.tokens[:num_tokens], self._hidden[:num_tokens], side)

    def _compute(self, inputs: DecoderInputs) -> None:
        hidden = self._inputs.decoder.forward(inputs, self._inputs.kv_cache.pages)
        self._hidden[: len(hidden)].copy_(hidden)
