"""A call that takes its time: what it does, who waits for it, how it ends."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from deltaplane_controlplane.errors import CancelledError, DeltaplaneError
from deltaplane_controlplane.futures import pending
from deltaplane_controlplane.operation_views import OperationKind, OperationState, OperationView
from deltaplane_controlplane.views import AdapterView


class Book(Protocol):
    """Where an operation is written down."""

    def clock(self) -> float:
        """Seconds since the epoch."""
        ...

    def keep(self, operation: "Operation") -> None:
        """It is not to be forgotten at its end."""
        ...

    def end(self, operation: "Operation", result: AdapterView | DeltaplaneError) -> None:
        """It has ended, unless it had already."""
        ...


class Operation:
    """One call. Made by Operations alone. It is the ports.Progress of its work. Safe for all threads.

    Its callers are counted: when the last one leaves, it is cancelled, unless it is kept.

    id: for people and programs. number: rises from one to the next.
    end: its result, when it has ended.
    """

    def __init__(
        self,
        book: Book,
        operation_id: str,
        number: int,
        kind: OperationKind,
        adapter: str,
        stage: Callable[[], str] | None,
        release: Callable[[DeltaplaneError | None], None],
    ) -> None:
        self.id = operation_id
        self.number = number
        self.kind = kind
        self.adapter = adapter
        self.end: Future[AdapterView] = pending()
        self.is_kept = False
        self._book = book
        self._stage = stage
        self._release = release
        self._create_time = book.clock()
        self._end_time: float | None = None
        self._progress: tuple[str, int, int | None] = ("queue", 0, None)
        self._result: AdapterView | DeltaplaneError | None = None
        self._cancelled: DeltaplaneError | None = None
        self._callers = 1
        self._begun = False
        self._when_failing: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    # Its work

    def report(self, stage: str, done: int, total: int | None) -> None:
        self._progress = (stage, done, total)

    def check(self) -> None:
        if self._cancelled is not None:
            raise self._cancelled

    # Its callers

    def join(self) -> bool:
        """Another caller waits for it; False where it is being cancelled."""
        with self._lock:
            self._callers += 1
            return self._cancelled is None

    def leave(self) -> None:
        """A caller waits no longer."""
        with self._lock:
            self._callers -= 1
            if self._callers or self.is_kept:
                return
        self.cancel(CancelledError(f"{self}: its callers have gone away", reason="ABANDONED"))

    def keep(self) -> None:
        """It goes on without callers, and stays known for a while after its end, which may have passed."""
        self._book.keep(self)

    def wait(self, timeout_s: float | None = None) -> AdapterView:
        """The result, for a caller who then leaves. Errors: those of the call, TimeoutError."""
        try:
            return self.end.result(timeout_s)
        finally:
            self.leave()

    def cancel(self, why: DeltaplaneError) -> None:
        """Asks it to end. What has not begun, or waits for something elsewhere, ends at once."""
        with self._lock:
            if self._end_time is not None or self._cancelled is not None:
                return
            self._cancelled = why
            begun, calls = self._begun, self._when_failing
            self._when_failing = []
        for call in calls:
            call()
        if not begun:
            self._book.end(self, why)

    def when_failing(self, call: Callable[[], None]) -> None:
        """Makes a call, once, when it is cancelled or fails, which may be now."""
        with self._lock:
            if not (self._cancelled or isinstance(self._result, DeltaplaneError)):
                self._when_failing.append(call)
                return
        call()

    @property
    def has_ended(self) -> bool:
        return self._end_time is not None

    @property
    def end_time(self) -> float | None:
        return self._end_time

    def view(self) -> OperationView:
        with self._lock:
            stage, done, total = self._progress
            if self._stage is not None and not (self._begun or self.has_ended):
                stage = self._stage()
            return OperationView(
                id=self.id,
                kind=self.kind,
                adapter=self.adapter,
                state=self.state,
                stage=stage,
                done_bytes=done,
                total_bytes=total,
                create_time=self._create_time,
                end_time=self._end_time,
                result=self._result,
            )

    @property
    def state(self) -> OperationState:
        match self._result:
            case None:
                return OperationState.RUNNING if self._cancelled is None else OperationState.CANCELLING
            case CancelledError():
                return OperationState.CANCELLED
            case DeltaplaneError():
                return OperationState.FAILED
        return OperationState.SUCCEEDED

    def __str__(self) -> str:
        return f"operation {self.id} ({self.kind.value} of adapter {self.adapter!r})"

    # The book

    def begin(self) -> bool:
        """Its work, or its last step, begins on this thread; False where it was cancelled before."""
        with self._lock:
            self._begun = not (self.has_ended or self._cancelled)
            return self._begun

    def note_end(self, result: AdapterView | DeltaplaneError) -> bool:
        """It has ended; False where it had already."""
        with self._lock:
            if self.has_ended:
                return False
            self._result = result
            self._end_time = self._book.clock()
            calls, self._when_failing = self._when_failing, []
        if isinstance(result, DeltaplaneError):
            for call in calls:
                call()
        return True

    def tell(self) -> None:
        """Gives everything back and tells those who wait, once it has ended."""
        error = self._result if isinstance(self._result, DeltaplaneError) else None
        self._release(error)
        if error is not None:
            self.end.set_exception(error)
        elif isinstance(self._result, AdapterView):
            self.end.set_result(self._result)
