"""The book of calls that take their time, which can be asked about, waited for and cancelled.

The model is google.longrunning.Operations (AIP-151). An operation is either work on a thread, which reports
its progress and looks now and then whether it is still wanted, or the wait for something that happens
elsewhere, such as a load, and a last step after it.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from deltaplane_controlplane.errors import (
    CancelledError,
    DeltaplaneError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.filters import PageToken, parse_operation_filter
from deltaplane_controlplane.operation import Operation
from deltaplane_controlplane.operation_views import OperationKind, OperationPage
from deltaplane_controlplane.unforeseen import unforeseen
from deltaplane_controlplane.views import AdapterView

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class OperationLimits:
    """Bounds of the book of operations.

    max_running: those under way. max_ended: those that are kept after their end, for `keep_s` seconds.
    threads: of local work. fetch_threads: of work that waits for a network.
    """

    max_running: int = 1024
    max_ended: int = 1000
    keep_s: float = 3600.0
    threads: int = 16
    fetch_threads: int = 8


def _nothing(_: DeltaplaneError | None) -> None:
    pass


class Operations:
    """The book of operations, and the threads that they run on. Kept in memory: a restart forgets it.

    clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time, limits: OperationLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or OperationLimits()
        self._epoch = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._running: dict[str, Operation] = {}
        self._ended: dict[str, Operation] = {}
        self._by_key: dict[Hashable, Operation] = {}
        self._by_adapter: dict[str, tuple[Operation, ...]] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="adapter-operation")
        self._fetchers = ThreadPoolExecutor(self._limits.fetch_threads, thread_name_prefix="adapter-fetch")

    # Beginning

    def check_room(self) -> None:
        """Errors: ResourceExhaustedError (too many are under way), UnavailableError (closed)."""
        with self._lock:
            if self._closed:
                raise _closed()
            if len(self._running) >= self._limits.max_running:
                raise ResourceExhaustedError(
                    f"{len(self._running)} operations are under way, which is all that may be: try later",
                    reason="TOO_MANY_OPERATIONS",
                )

    def joined(self, key: Hashable) -> Operation | None:
        """The operation under way that was run with this key, with one more caller."""
        with self._lock:
            operation = self._by_key.get(key)
        return operation if operation is not None and operation.join() else None

    def run(
        self,
        kind: OperationKind,
        adapter: str,
        work: Callable[[Operation], AdapterView],
        *,
        key: Hashable = None,
        is_fetch: bool = False,
        release: Callable[[DeltaplaneError | None], None] = _nothing,
    ) -> Operation:
        """Runs work on a thread. The operation has one caller.

        key: others who would ask for the same may join it. is_fetch: the work waits for a network.
        release: called once at the end, with the error if there was one.
        Errors: ResourceExhaustedError (too many are under way), UnavailableError (closed).
        """
        self.check_room()
        operation = self._add(kind, adapter, None, release, key)
        self._submit(self._fetchers if is_fetch else self._threads, operation, work)
        return operation

    def follow(
        self,
        kind: OperationKind,
        adapter: str,
        arrival: "Future[_T]",
        finish: Callable[[Operation, _T], AdapterView],
        *,
        stage: Callable[[], str],
        release: Callable[[DeltaplaneError | None], None] = _nothing,
    ) -> Operation:
        """Waits for what happens elsewhere, and then takes the last step on a thread. It has one caller.

        It is never refused, as something has begun already: `check_room` is to be called before that.

        stage: what happens there now. release: as in `run`.
        """
        operation = self._add(kind, adapter, stage, release, None)

        def arrived(future: "Future[_T]") -> None:
            error = future.exception()
            if error is not None:
                self.end(operation, _known(error, operation))
            else:
                self._submit(self._threads, operation, lambda op: finish(op, future.result()))

        arrival.add_done_callback(arrived)
        if self._closed:
            operation.cancel(_closed())
        return operation

    # Questions

    def get(self, operation_id: str) -> Operation:
        """Errors: NotFoundError."""
        with self._lock:
            self._forget_old()
            operation = self._running.get(operation_id) or self._ended.get(operation_id)
        if operation is None:
            raise NotFoundError(
                f"there is no operation {operation_id[:64]!r}: it never was, is forgotten, or was of an "
                "earlier run of the server; get the adapter instead",
                reason="OPERATION_NOT_FOUND",
            )
        return operation

    def list_operations(self, *, page_size: int = 0, page_token: str = "", filter: str = "") -> OperationPage:
        """Operations, the newest first. page_size: 0 is 100; more than 1000 are never answered.

        Errors: InvalidArgumentError.
        """
        if page_size < 0:
            raise InvalidArgumentError.for_field("page_size", f"{page_size} is below 0; 0 takes the default")
        size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        before = self._number_of(PageToken.decode(page_token, filter).after)
        matches = parse_operation_filter(filter)
        with self._lock:
            self._forget_old()
            known = [*self._running.values(), *self._ended.values()]
        known.sort(key=lambda operation: -operation.number)
        found = [(op.number, view) for op in known if matches(view := op.view())]
        page = [view for number, view in found if before is None or number < before]
        token = PageToken(page[size - 1].id, filter).encode() if len(page) > size else ""
        return OperationPage(tuple(page[:size]), token, len(found))

    def running_on(self, adapter: str) -> str:
        """The id of the newest operation under way on an adapter; empty for none. Takes no lock."""
        operations = self._by_adapter.get(adapter)
        return operations[-1].id if operations else ""

    def cancel(self, operation_id: str) -> Operation:
        """Asks an operation to end. Errors: NotFoundError, FailedPreconditionError (a deletion)."""
        operation = self.get(operation_id)
        if operation.kind is OperationKind.DELETE and not operation.has_ended:
            raise FailedPreconditionError(
                f"{operation} cannot be cancelled: a deletion is not taken back, and ends when the requests "
                "under way do; register the adapter anew",
                reason="DELETION_NOT_CANCELLABLE",
            )
        operation.cancel(CancelledError(f"{operation} was cancelled"))
        return operation

    def close(self) -> None:
        """Ends all with UnavailableError and waits for the threads. Idempotent."""
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        for operation in running:
            operation.cancel(_closed())
        self._fetchers.shutdown(cancel_futures=True)
        self._threads.shutdown(cancel_futures=True)

    def check_integrity(self) -> None:
        """Asserts that the books agree."""
        with self._lock:
            by_adapter = [op for operations in self._by_adapter.values() for op in operations]
            assert set(by_adapter) == set(self._running.values())
            assert set(self._by_key.values()) <= set(self._running.values())
            assert not self._running.keys() & self._ended.keys()
            assert len(self._ended) <= self._limits.max_ended

    # Ends

    def clock(self) -> float:
        return self._clock()

    def keep(self, operation: Operation) -> None:
        """An operation is not to be forgotten at its end."""
        with self._lock:
            if operation.is_kept:
                return
            operation.is_kept = True
            if operation.has_ended:
                self._ended[operation.id] = operation
                self._forget_old()

    def end(self, operation: Operation, result: AdapterView | DeltaplaneError) -> None:
        """An operation has ended, unless it had already."""
        with self._lock:
            if not operation.note_end(result):
                return
            del self._running[operation.id]
            rest = tuple(op for op in self._by_adapter[operation.adapter] if op is not operation)
            if rest:
                self._by_adapter[operation.adapter] = rest
            else:
                del self._by_adapter[operation.adapter]
            for key in [key for key, op in self._by_key.items() if op is operation]:
                del self._by_key[key]
            if operation.is_kept:
                self._ended[operation.id] = operation
                self._forget_old()
        operation.tell()

    def _add(
        self,
        kind: OperationKind,
        adapter: str,
        stage: Callable[[], str] | None,
        release: Callable[[DeltaplaneError | None], None],
        key: Hashable,
    ) -> Operation:
        with self._lock:
            number = next(self._numbers)
            operation = Operation(self, f"{self._epoch}-{number}", number, kind, adapter, stage, release)
            self._running[operation.id] = operation
            self._by_adapter[adapter] = (*self._by_adapter.get(adapter, ()), operation)
            if key is not None:
                self._by_key[key] = operation
            return operation

    def _submit(
        self, threads: ThreadPoolExecutor, operation: Operation, work: Callable[[Operation], AdapterView]
    ) -> None:
        try:
            threads.submit(partial(self._work, operation, work))
        except RuntimeError:  # closed meanwhile
            self.end(operation, _closed())

    def _work(self, operation: Operation, work: Callable[[Operation], AdapterView]) -> None:
        if not operation.begin():
            return
        try:
            result: AdapterView | DeltaplaneError = _without(work(operation), operation)
        except Exception as error:
            result = _known(error, operation)
        self.end(operation, result)

    def _number_of(self, operation_id: str) -> int | None:
        """The number that a page begins behind; None for the first page. Errors: InvalidArgumentError."""
        if not operation_id:
            return None
        epoch, _, number = operation_id.partition("-")
        if epoch != self._epoch or not number.isdecimal():
            raise InvalidArgumentError.for_field(
                "page_token", "it is of an earlier run of the server: list afresh"
            )
        return int(number)

    def _forget_old(self) -> None:
        """Those that ended first go first."""
        too_old = self._clock() - self._limits.keep_s
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= self._limits.max_ended and (oldest.end_time or 0.0) > too_old:
                return
            del self._ended[oldest.id]


def _without(view: AdapterView, operation: Operation) -> AdapterView:
    """The view at the end of an operation, which is no longer under way."""
    return replace(view, operation="") if view.operation == operation.id else view


def _known(error: BaseException, operation: Operation) -> DeltaplaneError:
    return error if isinstance(error, DeltaplaneError) else unforeseen(error, str(operation))


def _closed() -> UnavailableError:
    return UnavailableError("the server is shutting down")
