"""The engine: a thread that makes step after step, and the calls by which others hand it work."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import structlog

from deltaplane_controlplane.errors import (
    AlreadyExistsError,
    DeltaplaneError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_server.engine.api import (
    EngineObserver,
    EngineStats,
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    Runner,
    SilentObserver,
    StepHandle,
    TokenDecoder,
)
from deltaplane_server.engine.output import Output
from deltaplane_server.engine.request_state import RequestState
from deltaplane_server.scheduling.lease import AdapterLease
from deltaplane_server.scheduling.plan import SampledToken, StepPlan
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.sequence import Sequence

Deliver = Callable[[list[OutputDelta]], None]

_RECHECK_S = 0.25
"""The longest sleep while sequences wait for adapters; the arrival of one ends it at once."""

_JOIN_S = 30.0

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Inbox:
    """What other threads have asked for since the last step."""

    arrivals: list[RequestState] = field(default_factory=list)
    aborts: list[RequestState] = field(default_factory=list)
    aborted_adapters: list[int] = field(default_factory=list)
    forgotten_adapters: list[int] = field(default_factory=list)
    woken: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.arrivals or self.aborts or self.aborted_adapters or self.forgotten_adapters or self.woken
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way."""

    plan: StepPlan
    handle: StepHandle


class Engine:
    """Makes tokens for requests, many at a time.

    A runner that computes while the host does other things has the next step launched before the tokens of
    the one before it are read, so that it never waits for the host (asynchronous scheduling, as in vLLM and
    NanoFlow, Zhu et al., 2024). What an output that ends by its text or by a stop token would compute in that
    next step is thrown away; what it held is given back when that step has been read.

    submit, abort, abort_adapter, forget_adapter, wake, stats, drain and stop may be called from any thread.
    Everything else happens on the engine's own thread, or on the caller's of step() where start() is not
    used. The lock is never held while code of others runs, so wake() may be called with locks of theirs held.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        decoder: TokenDecoder,
        *,
        max_waiting: int,
        observer: EngineObserver | None = None,
    ) -> None:
        """max_waiting: requests that may wait for their first step before new ones are refused."""
        self._scheduler = scheduler
        self._runner = runner
        self._decoder = decoder
        self._max_waiting = max_waiting
        self._observer: EngineObserver = observer or SilentObserver()
        self._clock = scheduler.clock
        self._sequence_ids = count(1)
        self._outputs: dict[int, tuple[RequestState, Output]] = {}
        self._outbox: list[OutputDelta] = []
        self._under_way: deque[_Step] = deque()
        self._ending: list[Sequence] = []
        self._last_read = 0.0
        self._is_idle = False
        self._thread: threading.Thread | None = None

        self._changed = threading.Condition()  # guards what follows
        self._requests: dict[str, RequestState] = {}
        self._inbox = _Inbox()
        self._num_waiting = 0
        self._draining = False
        self._stopping = False
        self._has_failed = False

    # What other threads call.

    def submit(self, request: GenerationRequest) -> None:
        """Accepts a request; its deltas follow, and end with the one that has `usage`.

        From the return on, the engine owns the lease and releases it at the end. Where this raises, nothing
        is held and the lease is still the caller's.

        Errors: InvalidArgumentError (can never fit), AlreadyExistsError (the id is in flight),
        ResourceExhaustedError (the queue is full), UnavailableError (draining or failed).
        """
        config = self._scheduler.config
        config.check_fits(len(request.prompt_tokens), request.stop.max_tokens)
        forks: list[AdapterLease] = []
        try:
            if request.lease is not None:
                while len(forks) < request.num_outputs - 1:
                    forks.append(request.lease.fork())
            self._accept(self._new_state(request, forks))
        except BaseException:
            for fork in forks:
                fork.release()
            raise

    def abort(self, request_id: str) -> bool:
        """Ends a request within one step, with finish reason ABORTED; says whether it was in flight."""
        with self._changed:
            state = self._requests.get(request_id)
            if state is None:
                return False
            self._inbox.aborts.append(state)
            self._changed.notify_all()
            return True

    def abort_adapter(self, uid: int) -> None:
        """Ends all requests of an adapter version, and of compositions with it, within one step."""
        with self._changed:
            self._inbox.aborted_adapters.append(uid)
            self._changed.notify_all()

    def forget_adapter(self, uid: int) -> None:
        """Drops the cached KV of an adapter version that is gone for good."""
        with self._changed:
            self._inbox.forgotten_adapters.append(uid)
            self._changed.notify_all()

    def wake(self) -> None:
        """Says that adapters may have become resident or failed, or that there is room for more of them."""
        with self._changed:
            self._inbox.woken = True
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            num_arriving = sum(len(state.outputs) for state in self._inbox.arrivals)
        scheduler = self._scheduler
        return EngineStats(
            num_waiting=scheduler.num_waiting + num_arriving,
            num_running=scheduler.num_running,
            kv_pages_total=scheduler.kv.num_pages,
            kv_pages_free=scheduler.kv.num_free,
            prefix_cache_queries=scheduler.kv.queries,
            prefix_cache_hits=scheduler.kv.hits,
        )

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs and makes steps."""
        return self._thread is not None and self._thread.is_alive() and not self._has_failed

    def drain(self, grace_s: float) -> bool:
        """Refuses new requests from now on, and waits for those in flight to end.

        After `grace_s` seconds it has the rest aborted, which takes one step, and returns False.
        """
        with self._changed:
            self._draining = True
            if self._changed.wait_for(lambda: not self._requests, grace_s):
                return True
            self._inbox.aborts.extend(self._requests.values())
            self._changed.notify_all()
            return False

    def stop(self) -> None:
        """Aborts what is in flight, and ends the thread after the step under way. Idempotent."""
        self.drain(0.0)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                log.error("engine_does_not_stop", seconds=_JOIN_S)

    def start(self, deliver: Deliver) -> None:
        """Starts the thread. deliver: takes all deltas of a step in one call, on that thread."""
        self._thread = threading.Thread(target=self._loop, args=(deliver,), name="engine", daemon=True)
        self._thread.start()

    # What the engine's thread does.

    def step(self) -> list[OutputDelta]:
        """Takes in what was asked for, launches a step and reads one; returns what is new."""
        plan = self._schedule()
        self._launch(plan)
        self._read(until=self._runner.max_steps_under_way - 1 if plan else 0)
        return self._take_deltas(plan)

    def check_integrity(self) -> None:
        """Asserts that the books balance. Call between steps, on the engine's thread."""
        self._scheduler.check_integrity()
        with self._changed:
            arriving = {state.request.request_id for state in self._inbox.arrivals}
            states = {name: state for name, state in self._requests.items() if name not in arriving}
            assert self._num_waiting == sum(state.is_waiting for state in self._requests.values())
        open_ids = {o.sequence.id for s in states.values() for o in s.outputs if not o.is_finished}
        assert open_ids == self._outputs.keys()
        assert open_ids == {sequence.id for sequence in self._scheduler.sequences()}
        assert all(sequence.num_steps for sequence in self._ending), "something is not given back"
        assert len(self._under_way) < self._runner.max_steps_under_way

    def _loop(self, deliver: Deliver) -> None:
        try:
            while self._wait_for_work():
                deltas = self.step()
                if deltas:
                    deliver(deltas)
        except Exception:
            log.exception("engine_failed")
            deliver(self._fail_for_good())

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; false when the thread is to end."""
        with self._changed:
            if self._is_idle:
                timeout = _RECHECK_S if self._scheduler.num_waiting else None
                self._changed.wait_for(lambda: self._inbox or self._stopping, timeout)
            return bool(self._requests or self._under_way) or not self._stopping

    def _schedule(self) -> StepPlan:
        with self._changed:
            inbox, self._inbox = self._inbox, _Inbox()
            aborted = inbox.aborts + self._requests_of(inbox.aborted_adapters)
        for state in inbox.arrivals:
            for output in state.outputs:
                self._outputs[output.sequence.id] = state, output
                self._scheduler.add(output.sequence)
        for state in aborted:
            self._finish_all(state, Finish(FinishReason.ABORTED))
        for uid in inbox.forgotten_adapters:
            self._scheduler.forget_adapter(uid)
        if inbox.woken:
            self._scheduler.look_again()
        return self._scheduler.schedule()

    def _requests_of(self, uids: list[int]) -> list[RequestState]:
        """Requests of these adapter versions, or of compositions with them."""
        if not uids:
            return []
        gone = set(uids)
        return [state for state in self._requests.values() if not gone.isdisjoint(state.adapter_uids)]

    def _launch(self, plan: StepPlan) -> None:
        """Starts a step, and takes note of what planning it has changed."""
        for sequence in plan.started:
            if sequence.id in self._outputs:
                self._no_longer_waiting(self._outputs[sequence.id][0])
        for _ in plan.preempted:
            self._observer.on_preemption()
        for sequence, reason in plan.failed:
            self._finish(sequence, Finish(FinishReason.ERROR, error=_as_ours(reason)))
        if not plan:
            return
        try:
            handle = self._runner.submit(plan)
        except Exception:
            self._fail(plan)
            return
        self._scheduler.launch(plan)
        self._under_way.append(_Step(plan, handle))

    def _read(self, until: int) -> None:
        """Waits for the oldest step, unless at most `until` are under way, and takes in its tokens."""
        if len(self._under_way) <= until:
            return
        step = self._under_way.popleft()
        try:
            sampled = step.handle.result()
        except Exception:
            self._scheduler.abandon(step.plan)
            self._fail(step.plan)
            sampled = []
        else:
            self._scheduler.commit(step.plan, sampled)
        now = self._clock()
        for token in sampled:
            if token.sequence.id in self._outputs:
                self._take_token(token, now)
        self._give_back_ended()
        self._observe_step(step.plan, now)

    def _fail(self, plan: StepPlan) -> None:
        """An error of the runner ends the sequences of the step, and no others."""
        log.exception("step_failed", num_sequences=len(plan.scheduled), num_tokens=plan.num_tokens)
        error = InternalError("a step of the model failed; the server's log has the details")
        for part in plan.scheduled:
            self._finish(part.sequence, Finish(FinishReason.ERROR, error=error))

    def _observe_step(self, plan: StepPlan, now: float) -> None:
        """A step lasts from its plan, or from the end of the one before it, to its end."""
        self._observer.on_step(
            seconds=now - max(plan.time, self._last_read),
            num_tokens=plan.num_tokens,
            num_decodes=plan.num_decodes,
            num_adapters=plan.num_adapters,
        )
        self._last_read = now

    def _take_deltas(self, plan: StepPlan) -> list[OutputDelta]:
        deltas, self._outbox = self._outbox, []
        self._is_idle = not plan and not deltas and not self._under_way
        return deltas

    def _take_token(self, token: SampledToken, now: float) -> None:
        state, output = self._outputs[token.sequence.id]
        self._observe_token(state, output, now)
        try:
            finish = output.accept(token)
        except Exception:
            log.exception("detokenization_failed", request_id=state.request.request_id)
            error = InternalError("a token could not be turned into text; the server's log has the details")
            finish = Finish(FinishReason.ERROR, error=error)
        if finish is not None:
            self._finish(token.sequence, finish)
        elif output.is_due:
            self._outbox.append(output.take_delta())

    def _observe_token(self, state: RequestState, output: Output, now: float) -> None:
        if state.first_token is None:
            state.first_token = now
            self._observer.on_first_token(adapter=state.request.adapter, seconds=now - state.accepted)
        if output.last_token_time is not None:
            self._observer.on_inter_token(seconds=now - output.last_token_time)
        output.last_token_time = now

    def _finish_all(self, state: RequestState, finish: Finish) -> None:
        for output in state.outputs:
            self._finish(output.sequence, finish)

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        """Ends an output, which gives all that it held back; with the last one, its request. Idempotent."""
        if sequence.id not in self._outputs:
            return
        state, output = self._outputs.pop(sequence.id)
        self._scheduler.finish(sequence)
        self._ending.append(sequence)
        self._give_back_ended()
        is_last = all(other.is_finished for other in state.outputs if other is not output)
        usage = state.usage(self._clock()) if is_last else None
        self._outbox.append(output.take_delta(finish, usage))
        if usage is not None:
            self._observer.on_finish(request=state.request, usage=usage, reason=finish.reason)
            self._no_longer_waiting(state)
            with self._changed:
                del self._requests[state.request.request_id]
                self._changed.notify_all()

    def _give_back_ended(self) -> None:
        """Gives back what ended sequences still held for the steps under way, where those have been read."""
        still_ending = []
        for sequence in self._ending:
            if sequence.num_steps:
                still_ending.append(sequence)
                continue
            self._runner.forget(sequence)
            if sequence.lease is not None:
                sequence.lease.release()
        self._ending = still_ending

    def _no_longer_waiting(self, state: RequestState) -> None:
        with self._changed:
            self._num_waiting -= state.is_waiting
            state.is_waiting = False

    def _new_state(self, request: GenerationRequest, forks: list[AdapterLease]) -> RequestState:
        leases = [request.lease, *forks] if request.lease is not None else [None] * request.num_outputs
        return RequestState(request, leases, self._decoder, ids=self._sequence_ids, accepted=self._clock())

    def _accept(self, state: RequestState) -> None:
        request_id = state.request.request_id
        with self._changed:
            if self._has_failed:
                raise UnavailableError("the engine has failed; restart the server", reason="ENGINE_FAILED")
            if self._draining:
                raise UnavailableError(
                    "the server is draining and takes no new requests; send it to another one",
                    reason="DRAINING",
                )
            if request_id in self._requests:
                raise AlreadyExistsError(
                    f"request_id: {request_id!r} is in flight; use another one, or none",
                    reason="REQUEST_IN_FLIGHT",
                )
            if self._num_waiting >= self._max_waiting:
                raise ResourceExhaustedError(
                    f"{self._num_waiting} requests wait, which is the limit; retry later",
                    reason="QUEUE_FULL",
                    metadata={"max_waiting": str(self._max_waiting)},
                )
            self._requests[request_id] = state
            self._num_waiting += 1
            self._inbox.arrivals.append(state)
            self._changed.notify_all()

    def _fail_for_good(self) -> list[OutputDelta]:
        """After a fault of the engine itself: answers everyone, and takes nothing more."""
        error = InternalError("the engine has failed; the server's log has the details")
        with self._changed:
            self._has_failed = True
            states, self._requests = list(self._requests.values()), {}
            self._changed.notify_all()
        deltas, self._outbox = self._outbox, []
        for sequence in self._ending:
            if sequence.lease is not None:
                sequence.lease.release()
        for state in states:
            still_open = [output for output in state.outputs if not output.is_finished]
            for output in still_open:
                if output.sequence.lease is not None:
                    output.sequence.lease.release()
                usage = state.usage(self._clock()) if output is still_open[-1] else None
                deltas.append(output.take_delta(Finish(FinishReason.ERROR, error=error), usage))
        return deltas


def _as_ours(error: Exception) -> Exception:
    """Why an adapter cannot be loaded, as an error that may cross a plane."""
    if isinstance(error, DeltaplaneError):
        return error
    log.error("adapter_activation_failed", exc_info=error)
    return InternalError("the adapter could not be activated; the server's log has the details")
