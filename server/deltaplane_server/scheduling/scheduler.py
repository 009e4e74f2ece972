"""Continuous batching: which sequences compute which of their tokens in the next step.

Iteration-level scheduling (Orca, Yu et al. 2022) with chunked prefill (Sarathi-Serve, Agrawal et al. 2024)
over paged KV. A step takes first the decodes, then the prefills under way, then new sequences in the order of
the fair queue, within a budget of tokens. A sequence gets the pages of its whole prompt when it starts, so
only a decode can find no page; then the running sequence of the lowest rank gives its pages up and is
computed again later.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from deltaplane_server.scheduling.adapter_gate import AdapterGate
from deltaplane_server.scheduling.fair_queue import OUTPUT_TOKEN_COST, FairQueue
from deltaplane_server.scheduling.kv_pages import KvPages
from deltaplane_server.scheduling.plan import NO_SLOT, SampledToken, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from deltaplane_server.scheduling.sequence import Sequence, SequenceStatus

_LOOK_AHEAD = 64
"""Waiting sequences that may be passed over in a step because their KV does not fit."""


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    plan: StepPlan
    budget: int
    decodes: list[ScheduledSequence] = field(default_factory=list)
    prefills: list[ScheduledSequence] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        samples = start + num_tokens == sequence.num_tokens
        part = ScheduledSequence(sequence, start, num_tokens, sequence.slot, samples)
        (self.decodes if samples and num_tokens == 1 else self.prefills).append(part)
        self.budget -= num_tokens

    def finish(self) -> StepPlan:
        """The plan; within decodes and within prefills the rows of an adapter, and those of a composition,
        stand side by side, so that its weights meet one run of rows."""
        for parts in (self.decodes, self.prefills):
            parts.sort(key=_group)
        self.plan.scheduled = self.decodes + self.prefills
        self.plan.num_decodes = len(self.decodes)
        return self.plan


class Scheduler:
    """Owns the sequences that wait and run, and their KV pages. Used by one thread.

    A caller adds sequences, then over and over asks for a plan, launches it, hands the drawn tokens back with
    `commit`, and ends with `finish` each sequence that is done, aborted or failed.

    The next step may be planned, and launched, before the tokens of the one before it are known: a decode
    needs to know that there is a token, not which one. Steps are computed in the order of their launch, so
    KV pages that come back while a step still writes to them may be given away at once: whoever gets them is
    computed later. Adapters are loaded beside the steps, so a lease stays active until the last step of its
    sequence has been read.

    clock: seconds, never going back.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.kv = KvPages(
            config.num_pages, config.page_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._waiting = FairQueue(config.tenant_weights)
        self._running: list[Sequence] = []
        self._gate = AdapterGate(config.max_loras, config.ageing_s)
        self._arrivals: list[Sequence] = []
        self._watermark = max(1, config.num_pages // 100)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence that fits (see SchedulerConfig.check_fits)."""
        self._waiting.push(sequence)
        self._arrivals.append(sequence)

    def schedule(self) -> StepPlan:
        """The next step; empty where nothing can run.

        It must be launched, or its sequences finished, before the next one is asked for.
        """
        draft = _Draft(StepPlan(time=self.clock()), self.config.max_step_tokens)
        self._ask_for_arrivals(draft)
        self._schedule_decodes(draft)
        self._schedule_prefills(draft)
        if not draft.plan.preempted and self._has_room(draft):
            self._start_waiting(draft)
        return draft.finish()

    def launch(self, plan: StepPlan) -> None:
        """Takes note that a step is under way."""
        for part in plan.scheduled:
            sequence = part.sequence
            sequence.num_computed = part.end
            sequence.num_steps += 1
            sequence.num_pending += part.samples

    def commit(self, plan: StepPlan, sampled: Iterable[SampledToken]) -> None:
        """Takes note that the oldest step under way was computed, and of the tokens that were drawn; those of
        sequences that have ended meanwhile count for nothing."""
        for part in plan.scheduled:
            if part.sequence.status is SequenceStatus.RUNNING:
                self.kv.cache(part.sequence, part.start, part.end)
        self.abandon(plan)
        for token in sampled:
            if token.sequence.status is not SequenceStatus.FINISHED:
                token.sequence.tokens.append(token.token_id)
                self._waiting.charge(token.sequence.tenant, OUTPUT_TOKEN_COST)

    def abandon(self, plan: StepPlan) -> None:
        """Takes note that a step under way has ended, whatever became of it."""
        for part in plan.scheduled:
            sequence = part.sequence
            sequence.num_steps -= 1
            sequence.num_pending -= part.samples
            if sequence.status is SequenceStatus.WAITING and not sequence.num_steps:
                _deactivate(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes back all that a sequence has, whatever it was doing, but not its lease. Idempotent."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._dequeue(sequence)
        sequence.status = SequenceStatus.FINISHED

    def preempt(self, sequence: Sequence) -> None:
        """Takes the pages and the slot of a running sequence back, and lets it wait to be computed again."""
        self._stop(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._waiting.push_front(sequence)

    def look_again(self) -> None:
        """Something changed in the adapter manager, such as a load that ended."""
        self._gate.look_again()

    def forget_adapter(self, uid: int) -> None:
        """Drops the cached KV of an adapter version that is gone."""
        self.kv.forget(uid)

    def sequences(self) -> Iterator[Sequence]:
        """All that run, then all that wait."""
        yield from self._running
        yield from self._waiting

    def check_integrity(self) -> None:
        """Asserts that the books balance. Call between steps."""
        self.kv.check_integrity(self._running)
        self._waiting.check_integrity()
        self._gate.check_integrity(self._running, {s.adapter_uid for s in self._waiting})
        assert len(self._running) <= self.config.max_num_seqs
        assert self._running == sorted(self._running, key=_rank)
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert all(s.lease is None or s.lease.slot == s.slot for s in self._running), "a slot has moved"
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.pages
            assert sequence.num_computed == 0
            if sequence.lease is not None and not sequence.num_steps:
                assert sequence.lease.slot is None, "a waiting lease is active"

    def _ask_for_arrivals(self, draft: _Draft) -> None:
        """Has cold adapters loaded while their first sequences wait for their turn."""
        arrivals, self._arrivals = self._arrivals, []
        for sequence in arrivals:
            if sequence.lease is not None and sequence.status is SequenceStatus.WAITING:
                try:
                    self._gate.ask(sequence.lease, draft.plan.time)
                except Exception as error:
                    self._fail(sequence, error, draft)

    def _schedule_decodes(self, draft: _Draft) -> None:
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            if sequence.num_tokens - sequence.num_computed > 1 or _has_all_tokens(sequence):
                index += 1
            elif self.kv.extend(sequence):
                draft.add(sequence, 1)
                index += 1
            else:
                self._preempt_last(draft)

    def _preempt_last(self, draft: _Draft) -> None:
        """Makes room at the cost of the lowest rank. Decodes are scheduled in the order of rank, so that one
        has no part in the step yet, and the first is never preempted for another."""
        victim = self._running[-1]
        self.preempt(victim)
        draft.plan.preempted.append(victim)

    def _schedule_prefills(self, draft: _Draft) -> None:
        for sequence in self._running:
            remaining = sequence.num_tokens - sequence.num_computed
            if remaining > 1 and draft.budget > 0:
                draft.add(sequence, min(remaining, draft.budget))

    def _start_waiting(self, draft: _Draft) -> None:
        now = draft.plan.time
        num_passed_over = 0
        closed = self._gate.closed()
        for sequence in self._waiting.in_order(closed):
            if not self._has_room(draft) or draft.budget < self._least_chunk(sequence):
                break
            if sequence.num_steps:  # preempted; the step under way is to be read before it has other pages
                continue
            if not self._fits(sequence):
                if sequence.blocked_since is None:
                    sequence.blocked_since = now
                num_passed_over += 1
                if num_passed_over == _LOOK_AHEAD or now - sequence.blocked_since >= self.config.ageing_s:
                    break
            elif self._enter(sequence, draft):
                self._start(sequence, draft)
            elif sequence.status is SequenceStatus.WAITING:
                closed.add(sequence.adapter_uid)

    def _has_room(self, draft: _Draft) -> bool:
        """Whether there is a seat, a token and a page for yet another sequence."""
        return (
            len(self._running) < self.config.max_num_seqs
            and draft.budget > 0
            and (not self._running or self.kv.num_free > self._watermark)
        )

    def _least_chunk(self, sequence: Sequence) -> int:
        """The fewest tokens that a sequence may start with."""
        return 1 if self.config.enable_chunked_prefill else sequence.num_tokens

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are pages for a waiting sequence, and some to spare for running ones to grow."""
        return self.kv.fits(sequence, self._watermark if self._running else 0)

    def _enter(self, sequence: Sequence, draft: _Draft) -> bool:
        """Gets a waiting sequence the slot of its adapter, if that is resident."""
        if sequence.lease is None:
            return True
        try:
            slot = self._gate.enter(sequence.lease, draft.plan.time, self._running)
        except Exception as error:
            self._fail(sequence, error, draft)
            return False
        sequence.slot = NO_SLOT if slot is None else slot
        return slot is not None

    def _start(self, sequence: Sequence, draft: _Draft) -> None:
        now = draft.plan.time
        self._waiting.remove(sequence)
        self.kv.allocate(sequence)
        if sequence.lease is not None:
            self._note_adapter_wait(sequence, self._gate.started(sequence.adapter_uid), now)
        sequence.status = SequenceStatus.RUNNING
        sequence.blocked_since = None
        if sequence.started is None:
            sequence.started = now
            sequence.num_cached = sequence.num_computed
            self._waiting.charge(sequence.tenant, sequence.num_prompt - sequence.num_cached)
        insort(self._running, sequence, key=_rank)
        draft.plan.started.append(sequence)
        draft.add(sequence, min(sequence.num_tokens - sequence.num_computed, draft.budget))

    def _note_adapter_wait(self, sequence: Sequence, cold_since: float | None, now: float) -> None:
        """All that waited for an adapter that has become resident waited until now."""
        if cold_since is None:
            return
        for waited in (sequence, *self._waiting.of_adapter(sequence.adapter_uid)):
            waited.adapter_wait += now - max(cold_since, waited.arrival)

    def _fail(self, sequence: Sequence, error: Exception, draft: _Draft) -> None:
        self.finish(sequence)
        draft.plan.failed.append((sequence, error))

    def _dequeue(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        if not self._waiting.has_adapter(sequence.adapter_uid):
            self._gate.abandon(sequence.adapter_uid)

    def _stop(self, sequence: Sequence) -> None:
        index = bisect_left(self._running, _rank(sequence), key=_rank)
        assert self._running[index] is sequence
        del self._running[index]
        self.kv.free(sequence)
        sequence.slot = NO_SLOT
        if sequence.lease is not None:
            self._gate.stopped(sequence.adapter_uid)
        if not sequence.num_steps:
            _deactivate(sequence)


def _deactivate(sequence: Sequence) -> None:
    if sequence.lease is not None:
        sequence.lease.deactivate()


def _has_all_tokens(sequence: Sequence) -> bool:
    """Whether no further token is to be drawn, though the last one may still be on its way."""
    return sequence.num_drawn >= sequence.stop.max_tokens


def _group(part: ScheduledSequence) -> int:
    """The same for all parts of one adapter or composition."""
    return hash(part.sequence.adapter_uid)


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    """The lower, the more a running sequence is worth keeping: by priority, then by arrival."""
    return -sequence.priority, sequence.arrival, sequence.id
