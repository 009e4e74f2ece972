"""A runner without tensors, which checks every step it is given.

The KV of a token is simulated as the token itself and the adapter that computed it, written at its place in
the pages. The next token is a hash of the whole context as it is read back from there, so that a page lost,
shared or overwritten shows at once, and an output that survives a preemption is known in advance.
"""

import threading
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from deltaplane_server.engine.api import StepHandle
from deltaplane_server.scheduling.lease import AdapterLease, AdapterUid, members
from deltaplane_server.scheduling.plan import NO_SLOT, SampledToken, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence
from deltaplane_server.scheduling.sequence import SequenceStatus
from fake_leases import FakeAdapters

VOCAB_SIZE = 97

_LETTERS = {token: chr(ord("a") + token % 26) for token in range(VOCAB_SIZE)}


def next_token(uid: AdapterUid, context: Sequence[int]) -> int:
    """What the fake model draws for an adapter (0: base), or for a composition, after a context."""
    name = uid if isinstance(uid, int) else zlib.crc32(repr(uid).encode())
    return zlib.crc32(array("I", [name, *context]).tobytes()) % VOCAB_SIZE


def expected_tokens(uid: AdapterUid, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The output that a sequence must have, whatever happens around it."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(uid, context))
    return context[len(prompt) :]


class LetterDecoder:
    """Each token is one letter."""

    byte_fallback_ids: frozenset[int] = frozenset()
    pieces: Mapping[int, str] = _LETTERS

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(_LETTERS[token] for token in token_ids)


class UnsoundPlanError(BaseException):
    """A plan that no scheduler may make. An Exception would be taken for a fault of the device."""


@dataclass
class _Step:
    """A step under way (engine.api.StepHandle).

    pages, tokens: of each part's sequence when the step was submitted.
    """

    runner: "FakeRunner"
    plan: StepPlan
    pages: list[list[int]]
    tokens: list[list[int]]
    failure: Exception | None

    def result(self) -> list[SampledToken]:
        assert self.runner.gate.wait(30), "nobody opened the gate"
        return self.runner.compute(self)


class FakeRunner:
    """config: what steps must keep to. adapters: whose slots steps must use.

    max_steps_under_way: a step is computed when it is read, as late as a device could.

    gate: steps wait while it is not set. failures: raised by the next steps when they are submitted, one
    each; late_failures: when they are read.
    num_steps: how many there were; most_decodes: the most in one.
    """

    def __init__(
        self, config: SchedulerConfig, adapters: FakeAdapters | None = None, *, max_steps_under_way: int = 1
    ) -> None:
        self.max_steps_under_way = max_steps_under_way
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.late_failures: list[Exception] = []
        self.num_steps = 0
        self.most_decodes = 0
        self._config = config
        self._adapters = adapters
        self._store: dict[tuple[int, int], tuple[AdapterUid, int]] = {}
        self._live: dict[int, TokenSequence] = {}
        self._drawn: dict[int, int] = {}
        self._under_way: deque[_Step] = deque()

    def submit(self, plan: StepPlan) -> StepHandle:
        self.num_steps += 1
        self.most_decodes = max(self.most_decodes, plan.num_decodes)
        self._live.update((part.sequence.id, part.sequence) for part in plan.scheduled)
        try:
            assert len(self._under_way) < self.max_steps_under_way, "too many steps are under way"
            self._check_plan(plan)
        except AssertionError as error:
            raise UnsoundPlanError(str(error)) from error
        if self.failures:
            raise self.failures.pop(0)
        sequences = [part.sequence for part in plan.scheduled]
        failure = self.late_failures.pop(0) if self.late_failures else None
        pages, tokens = [list(s.pages) for s in sequences], [list(s.tokens) for s in sequences]
        self._under_way.append(_Step(self, plan, pages, tokens, failure))
        return self._under_way[-1]

    def compute(self, step: _Step) -> list[SampledToken]:
        assert step is self._under_way.popleft(), "steps are read in another order"
        try:
            contexts = self._compute_kv(step)
        except AssertionError as error:
            raise UnsoundPlanError(str(error)) from error
        sampled = [
            self._sample(part.sequence, context)
            for part, context in zip(step.plan.scheduled, contexts, strict=True)
            if part.samples
        ]
        if step.failure is not None:
            raise step.failure
        return sampled

    def forget(self, sequence: TokenSequence) -> None:
        assert not sequence.num_steps, "a sequence is forgotten before its last step is read"
        self._live.pop(sequence.id, None)
        self._drawn.pop(sequence.id, None)

    @property
    def num_remembered(self) -> int:
        """Sequences that ran and were not forgotten."""
        return len(self._live)

    def _check_plan(self, plan: StepPlan) -> None:
        parts = plan.scheduled
        assert parts, "an empty step is computed"
        assert len({part.sequence.id for part in parts}) == len(parts) <= self._config.max_num_seqs
        assert plan.num_tokens <= self._config.max_step_tokens
        assert [part.samples and part.num_tokens == 1 for part in parts] == [
            index < plan.num_decodes for index in range(len(parts))
        ]
        assert plan.num_adapters <= self._config.max_loras
        groups = [key for key, _ in groupby(parts[: plan.num_decodes], lambda part: part.slot)]
        assert len(set(groups)) == len(groups), "rows of an adapter do not stand side by side"
        holders = Counter(page for sequence in self._live.values() for page in sequence.pages)
        for part in parts:
            self._check_part(part, holders)

    def _check_part(self, part: ScheduledSequence, holders: Counter[int]) -> None:
        sequence = part.sequence
        size = self._config.page_size
        assert sequence.status is SequenceStatus.RUNNING
        assert part.start < len(sequence.tokens) + sequence.num_pending
        assert sequence.num_drawn < sequence.stop.max_tokens, "a token is drawn beyond the last one"
        assert part.start == sequence.num_computed
        assert part.num_tokens > 0
        assert part.end <= sequence.num_tokens <= self._config.max_sequence_tokens
        assert part.samples == (part.end == sequence.num_tokens)
        assert all(0 <= page < self._config.num_pages for page in sequence.pages)
        assert part.end <= len(sequence.pages) * size
        for page in sequence.pages[part.start // size : -(-part.end // size)]:
            assert holders[page] == 1, f"page {page}, which is written to, is shared"
        self._check_slot(part)

    def _check_slot(self, part: ScheduledSequence) -> None:
        if part.sequence.lease is None:
            assert part.slot == NO_SLOT
        else:
            assert part.slot == part.sequence.lease.slot
            self._check_occupant(part)

    def _check_occupant(self, part: ScheduledSequence) -> None:
        if self._adapters is None or part.slot == NO_SLOT:
            return
        slots = (part.slot,) if isinstance(part.slot, int) else tuple(slot for slot, _ in part.slot)
        assert tuple(map(self._adapters.occupant, slots)) == members(part.sequence.adapter_uid)

    def _compute_kv(self, step: _Step) -> list[list[int]]:
        """Writes the KV of the step's tokens; returns what each sequence can then read back."""
        contexts = []
        for part, pages, tokens in zip(step.plan.scheduled, step.pages, step.tokens, strict=True):
            self._check_occupant(part)
            if part.end > len(tokens):
                tokens.append(self._drawn[part.sequence.id])
            self._write(part, pages, tokens)
            contexts.append(tokens[: part.end])
        for part, pages, context in zip(step.plan.scheduled, step.pages, contexts, strict=True):
            self._check_readable(part, pages, context)
        return contexts

    def _write(self, part: ScheduledSequence, pages: list[int], tokens: list[int]) -> None:
        size = self._config.page_size
        for position in range(part.start, part.end):
            place = pages[position // size], position % size
            self._store[place] = part.sequence.adapter_uid, tokens[position]

    def _check_readable(self, part: ScheduledSequence, pages: list[int], context: list[int]) -> None:
        size, uid = self._config.page_size, part.sequence.adapter_uid
        found = [self._store[pages[i // size], i % size] for i in range(part.end)]
        expected = [(uid, token) for token in context]
        assert found == expected, f"the KV of sequence {part.sequence.id} is not its own"

    def _sample(self, sequence: TokenSequence, context: list[int]) -> SampledToken:
        token = self._drawn[sequence.id] = next_token(sequence.adapter_uid, context)
        if sequence.sampling.logprobs is None:
            return SampledToken(sequence, token)
        top = tuple((token + i, -0.5 - i) for i in range(sequence.sampling.logprobs))
        return SampledToken(sequence, token, logprob=-0.5, top=top)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_sequence(
    number: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    lease: AdapterLease | None = None,
    tenant: str = "",
    priority: int = 0,
    arrival: float = 0.0,
) -> TokenSequence:
    """A sequence of its own request, drawn greedily."""
    return TokenSequence(
        id=number,
        request_id=f"request-{number}",
        index=0,
        tokens=list(prompt),
        num_prompt=len(prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=max_tokens),
        lease=lease,
        tenant=tenant,
        priority=priority,
        arrival=arrival,
    )
