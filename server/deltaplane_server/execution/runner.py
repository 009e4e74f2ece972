"""Computes steps: from a plan of tokens to the tokens that follow."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_server.execution.array_transfer import integers_to_device
from deltaplane_server.execution.graphs.decode_graphs import DecodeGraphs
from deltaplane_server.execution.graphs.step_graphs import StepGraphs
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.sampler import SampledBatch, Sampler, draws_likeliest
from deltaplane_server.execution.step_inputs import (
    LoraPool,
    StepInputs,
    StepOutput,
    opened_pages,
    sampling_rows,
)
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.models.decoder import Decoder
from deltaplane_server.scheduling.plan import SampledToken, StepPlan
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step under way (engine.api.StepHandle).

    batch: on its way to the host. arrived: passes when it is there; None where it is there already.
    """

    batch: SampledBatch | None
    arrived: torch.cuda.Event | None = None

    def result(self) -> list[SampledToken]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.batch.to_host() if self.batch is not None else []


class ModelRunner:
    """The decoder, its KV pages, its adapters and the sampler on one device (engine.api.Runner).

    On a CPU a step is computed inside submit(). On a GPU submit() launches it, as a graph where there is one
    that holds it, and a step's tokens are copied to the host while the caller does other things, such as
    submitting the next one.

    feed: holds the tokens of the largest step.
    lora_pool: None serves the base model alone.
    graphs: of this decoder, this feed, these pages and adapters; None launches each kernel of a step.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        feed: TokenFeed,
        lora_pool: LoraPool | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._feed = feed
        self._graphs = graphs
        self._inputs = StepInputs(decoder, kv_cache.layout, feed, lora_pool)
        self._sampler = Sampler()

    @property
    def max_steps_under_way(self) -> int:
        """See engine.api.Runner."""
        return 1 if self._decoder.device.type == "cpu" else 2

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> RunningStep:
        """Starts a step. The pages of `plan` must hold all its tokens.

        Errors: ValueError when they do not, KeyError for a pending token of a sequence that had no part in
        the step before.
        """
        if not plan:
            return RunningStep(None)
        with self._on_device():
            if self._graphs is not None and self._graphs.decodes.holds(plan):
                return self._to_host(self._decode(self._graphs.decodes, plan))
            return self._to_host(self._draw(plan, self._compute(plan)))

    def forget(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a finished sequence (its token counts)."""
        self._sampler.forget(sequence)

    def _decode(self, graphs: DecodeGraphs, plan: StepPlan) -> SampledBatch:
        output = graphs.run(plan.scheduled)
        sequences = [s.sequence for s in plan.scheduled]
        if all(draws_likeliest(sequence) for sequence in sequences):
            self._feed.keep(sequences, None)
            return SampledBatch(sequences, output.likeliest, None)
        return self._sample(output.logits.float(), sequences, output.inputs)

    def _compute(self, plan: StepPlan) -> StepOutput:
        if self._graphs is not None and self._graphs.prompts.holds(plan):
            return self._graphs.prompts.run(plan.scheduled)
        inputs = self._inputs.of(plan.scheduled)
        if self._decoder.device.type == "cpu":  # kernels of a GPU read no slot that is not written
            self._kv_cache.clear(opened_pages(plan.scheduled, self._kv_cache.layout.page_size))
        hidden = self._decoder.forward(inputs, self._kv_cache.pages)
        return StepOutput(inputs.tokens, hidden, inputs.side)

    def _draw(self, plan: StepPlan, output: StepOutput) -> SampledBatch | None:
        """None where nothing is sampled."""
        rows, sequences = sampling_rows(plan.scheduled)
        if not rows:
            self._feed.keep([], None)
            return None
        last = integers_to_device(rows, self._decoder.device)
        side = output.side.at(last) if output.side is not None else None
        logits = self._decoder.logits(output.hidden.index_select(0, last), side=side)
        return self._sample(logits, sequences, output.tokens.index_select(0, last))

    def _sample(
        self, logits: Tensor, sequences: Sequence[TokenSequence], last_tokens: Tensor
    ) -> SampledBatch:
        """last_tokens: [R], each sequence's last one, which the host may not know yet."""
        batch = self._sampler.sample(logits, sequences, last_tokens)
        self._feed.keep(sequences, batch.tokens)
        return batch

    def _to_host(self, batch: SampledBatch | None) -> RunningStep:
        if batch is None or self._decoder.device.type == "cpu":
            return RunningStep(batch)
        copy = batch.start_copy()
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return RunningStep(copy, arrived)

    def _on_device(self) -> AbstractContextManager[object]:
        """The current device is a thread's own, and kernels are launched on it."""
        device = self._decoder.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
