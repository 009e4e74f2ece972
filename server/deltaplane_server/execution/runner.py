"""Computes steps: from a plan of tokens to the tokens that follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deltaplane_kernels.attention import AttentionPlan, TokenRun
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.sampler import SampledBatch, Sampler
from deltaplane_server.models.decoder import Decoder, DecoderInputs, LoraStep
from deltaplane_server.scheduling.plan import SampledToken, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence


class LoraPool(Protocol):
    """The adapters on the device."""

    def step(self, segments: Sequence[tuple[int, int]]) -> LoraStep | None:
        """segments: (slot or NO_SLOT, rows) side by side, in row order. None where no row has an adapter."""
        ...


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step under way (engine.api.StepHandle)."""

    batch: SampledBatch | None

    def result(self) -> list[SampledToken]:
        return self.batch.to_host() if self.batch is not None else []


class ModelRunner:
    """The decoder, its KV pages, its adapters and the sampler on one device (engine.api.Runner).

    On a CPU a step is computed inside submit().

    lora_pool: None serves the base model alone.
    """

    def __init__(self, decoder: Decoder, kv_cache: KVCache, lora_pool: LoraPool | None = None) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._lora_pool = lora_pool
        self._sampler = Sampler()
        self._windows = frozenset(decoder.config.windows)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> RunningStep:
        """Starts a step. The pages of `plan` must hold all its tokens.

        Errors: ValueError when they do not.
        """
        if not plan:
            return RunningStep(None)
        inputs = self._inputs(plan.scheduled)
        self._kv_cache.clear(self._opened_pages(plan.scheduled))
        hidden = self._decoder.forward(inputs, self._kv_cache.pages)
        rows, sequences = _sampling_rows(plan.scheduled)
        if not rows:
            return RunningStep(None)
        logits = self._decoder.logits(hidden.index_select(0, self._int64(rows)))
        return RunningStep(self._sampler.sample(logits, sequences))

    def forget(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a finished sequence (its random state)."""
        self._sampler.forget(sequence)

    def _inputs(self, scheduled: Sequence[ScheduledSequence]) -> DecoderInputs:
        tokens = [token for s in scheduled for token in s.sequence.tokens[s.start : s.end]]
        positions = [position for s in scheduled for position in range(s.start, s.end)]
        runs = [TokenRun(s.start, s.num_tokens, s.sequence.pages) for s in scheduled]
        attention = AttentionPlan(
            runs,
            layout=self._kv_cache.layout,
            windows=self._windows,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        lora = None
        if self._lora_pool is not None:
            lora = self._lora_pool.step([(s.slot, s.num_tokens) for s in scheduled])
        return DecoderInputs(self._int64(tokens), self._int64(positions), attention, lora)

    def _opened_pages(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """Pages that this step starts to fill and does not fill up; only a sequence's last can be one."""
        size = self._kv_cache.layout.page_size
        return [
            s.sequence.pages[s.end // size]
            for s in scheduled
            if s.end % size and s.end - s.end % size >= s.start
        ]

    def _int64(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._decoder.device)


def _sampling_rows(scheduled: Sequence[ScheduledSequence]) -> tuple[list[int], list[TokenSequence]]:
    """The row of each sampling sequence's last token, and the sequences."""
    rows, sequences, end = [], [], 0
    for s in scheduled:
        end += s.num_tokens
        if s.samples:
            rows.append(end - 1)
            sequences.append(s.sequence)
    return rows, sequences
