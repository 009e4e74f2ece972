"""What one step computes: the scheduler's word to the runner, and the runner's answer."""

from dataclasses import dataclass, field

from deltaplane_server.scheduling.lease import Slots
from deltaplane_server.scheduling.sequence import Sequence

NO_SLOT = -1
"""The slot of base-model rows."""


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's share of a step: tokens[start : start + num_tokens] are computed.

    slot: the adapter's slot, those of a composition with their weights, or NO_SLOT.
    samples: whether the last of them yields the next token (false for a prefill chunk that is not the last).
    """

    sequence: Sequence
    start: int
    num_tokens: int
    slot: Slots
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One step. Decodes (num_tokens == 1 and samples) come first, then prefill chunks.

    Within decodes and within chunks, the rows of an adapter, and those of a composition, stand side by side.

    KV pages for all tokens of the step are already in each sequence's `pages`.

    time: when it was made, in seconds on the scheduler's clock.
    started: sequences that were waiting before this step, those that go on after a preemption included.
    preempted: sequences that gave up their pages, and wait again.
    failed: waiting sequences whose adapter cannot be loaded, with the reason; they are finished.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_decodes: int = 0
    time: float = 0.0
    started: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def num_adapters(self) -> int:
        """Distinct adapters, members of compositions among them."""
        slots: set[int] = set()
        for where in {part.slot for part in self.scheduled}:
            slots.update((where,) if isinstance(where, int) else (slot for slot, _ in where))
        return len(slots - {NO_SLOT})

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of a sequence.

    logprob: its natural log-probability under the model's unmodified distribution; None unless asked for.
    top: the likeliest (token, log-probability) pairs, likeliest first.
    """

    sequence: Sequence
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
