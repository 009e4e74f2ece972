"""A step's plan as the decoder and the sampler take it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltaplane_kernels.attention import AttentionPlan, KVLayout, TokenRun
from deltaplane_kernels.lora_segments import Segments
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.models.decoder import Decoder, DecoderInputs, LoraStep, SideStep
from deltaplane_server.scheduling.plan import ScheduledSequence
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence


class LoraPool(Protocol):
    """The adapters on the device."""

    def step(self, segments: Segments) -> LoraStep | None:
        """segments: (slots, rows) side by side, in row order. None where no row has an adapter."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed, and what its logits take. Of T rows; that of a graph is good until the next step.

    tokens: [T], int64, those that the step went on from.
    hidden: [T, hidden_size], what Decoder.forward returns.
    side: as of DecoderInputs.
    """

    tokens: Tensor
    hidden: Tensor
    side: SideStep | None


class StepInputs:
    """Makes the inputs of steps of any shape."""

    def __init__(
        self, decoder: Decoder, layout: KVLayout, feed: TokenFeed, lora_pool: LoraPool | None
    ) -> None:
        self._decoder = decoder
        self._feed = feed
        self._layout = layout
        self._lora_pool = lora_pool
        self._windows = frozenset(decoder.config.windows)

    def of(self, scheduled: Sequence[ScheduledSequence]) -> DecoderInputs:
        """Errors: ValueError where the pages of a sequence do not hold its tokens; as TokenFeed.send."""
        device = self._decoder.device
        attention = AttentionPlan(
            token_runs(scheduled),
            layout=self._layout,
            windows=self._windows,
            dtype=self._decoder.dtype,
            device=device,
        )
        lora = None
        if self._lora_pool is not None:
            lora = self._lora_pool.step(segments(scheduled))
        num_tokens = attention.num_tokens
        self._feed.send(scheduled, num_tokens)
        return DecoderInputs(self._feed.tokens(num_tokens), _positions(scheduled, attention), attention, lora)


def _positions(scheduled: Iterable[ScheduledSequence], attention: AttentionPlan) -> Tensor:
    """[T]. On a GPU attention has them already."""
    if attention.index is not None:
        return attention.index.positions
    return torch.tensor([position for s in scheduled for position in range(s.start, s.end)])


def token_runs(scheduled: Iterable[ScheduledSequence]) -> list[TokenRun]:
    """What attention is to know of each sequence."""
    return [TokenRun(s.start, s.num_tokens, s.sequence.pages) for s in scheduled]


def segments(scheduled: Iterable[ScheduledSequence]) -> Segments:
    """(slots, rows) of each sequence."""
    return [(s.slot, s.num_tokens) for s in scheduled]


def sampling_rows(scheduled: Iterable[ScheduledSequence]) -> tuple[list[int], list[TokenSequence]]:
    """The row of each sampling sequence's last token, and the sequences."""
    rows, sequences, end = [], [], 0
    for s in scheduled:
        end += s.num_tokens
        if s.samples:
            rows.append(end - 1)
            sequences.append(s.sequence)
    return rows, sequences


def opened_pages(scheduled: Iterable[ScheduledSequence], page_size: int) -> list[int]:
    """Pages that this step starts to fill and does not fill up; only a sequence's last can be one."""
    return [
        s.sequence.pages[s.end // page_size]
        for s in scheduled
        if s.end % page_size and s.end - s.end % page_size >= s.start
    ]
