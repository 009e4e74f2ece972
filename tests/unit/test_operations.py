"""The book of operations: begin, follow, join, wait, cancel, forget."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.errors import (
    CancelledError,
    DeltaplaneError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.futures import done, pending
from deltaplane_controlplane.operation import Operation
from deltaplane_controlplane.operation_views import OperationKind, OperationState
from deltaplane_controlplane.operations import OperationLimits, Operations
from deltaplane_controlplane.views import AdapterView


@pytest.fixture
def view(plane: ControlPlane) -> AdapterView:
    return plane.add("a")


@pytest.fixture
def book() -> Iterator[Operations]:
    book = Operations(limits=OperationLimits(max_running=4, max_ended=3, threads=2))
    yield book
    book.check_integrity()
    book.close()


class Work:
    """Work that goes on until it is told to end or that nobody wants it."""

    def __init__(self, result: AdapterView | Exception) -> None:
        self.result = result
        self.is_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, operation: Operation) -> AdapterView:
        operation.report("fetch", 3, 7)
        self.is_begun.set()
        while not self.may_end.wait(0.002):
            operation.check()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    @classmethod
    def done(cls, result: AdapterView | Exception) -> "Work":
        work = cls(result)
        work.may_end.set()
        return work


def run(book: Operations, work: Callable[[Operation], AdapterView], adapter: str = "a") -> Operation:
    return book.run(OperationKind.REGISTER, adapter, work)


def test_work_tells_how_far_it_is_and_how_it_ended(book: Operations, view: AdapterView) -> None:
    work = Work(view)
    operation = run(book, work)
    assert work.is_begun.wait(30)
    shown = book.get(operation.id).view()
    assert (shown.kind, shown.adapter, shown.state) == (OperationKind.REGISTER, "a", OperationState.RUNNING)
    assert (shown.stage, shown.done_bytes, shown.total_bytes) == ("fetch", 3, 7)
    assert (shown.end_time, shown.result) == (None, None)
    assert book.running_on("a") == operation.id
    operation.keep()
    work.may_end.set()
    assert operation.wait(30) == view
    shown = book.get(operation.id).view()
    assert (shown.state, shown.result) == (OperationState.SUCCEEDED, view)
    assert shown.end_time is not None
    assert shown.end_time >= shown.create_time
    assert book.running_on("a") == ""


@pytest.mark.parametrize("error", [InvalidArgumentError("bad files"), UnavailableError("no answer")])
def test_work_that_fails(book: Operations, error: DeltaplaneError) -> None:
    operation = run(book, Work.done(error))
    operation.keep()
    with pytest.raises(type(error), match=error.message):
        operation.wait(30)
    assert book.get(operation.id).view().state is OperationState.FAILED


def test_an_error_that_nobody_foresaw_has_an_id_in_the_log(
    book: Operations, capsys: pytest.CaptureFixture[str]
) -> None:
    operation = run(book, Work.done(ZeroDivisionError("secret")))
    with pytest.raises(InternalError, match="error_id") as caught:
        operation.wait(30)
    assert "secret" not in caught.value.message
    assert caught.value.metadata["error_id"] in capsys.readouterr().out


def test_what_happens_elsewhere_is_followed_to_a_last_step(book: Operations, view: AdapterView) -> None:
    arrival: Future[int] = pending()
    stages = ["room", "copy"]
    got: list[int] = []

    def finish(_: Operation, value: int) -> AdapterView:
        got.append(value)
        return view

    operation = book.follow(OperationKind.LOAD, "a", arrival, finish, stage=lambda: stages[0])
    assert operation.view().stage == "room"
    del stages[0]
    assert operation.view().stage == "copy"
    arrival.set_result(5)
    assert operation.wait(30) == view
    assert got == [5]


def test_what_fails_elsewhere_takes_no_last_step(book: Operations, view: AdapterView) -> None:
    arrival: Future[None] = pending()
    released: list[DeltaplaneError | None] = []
    operation = book.follow(
        OperationKind.PIN, "a", arrival, lambda *_: view, stage=lambda: "room", release=released.append
    )
    error = ResourceExhaustedError("no room")
    arrival.set_exception(error)
    with pytest.raises(ResourceExhaustedError):
        operation.wait(30)
    assert released == [error]


class TestCancel:
    def test_work_ends_where_it_looks(self, book: Operations, view: AdapterView) -> None:
        work = Work(view)
        operation = run(book, work)
        operation.keep()
        assert work.is_begun.wait(30)
        book.cancel(operation.id)
        with pytest.raises(CancelledError, match="was cancelled"):
            operation.wait(30)
        assert operation.view().state is OperationState.CANCELLED
        book.cancel(operation.id)
        assert operation.view().state is OperationState.CANCELLED

    def test_work_that_does_not_look_again_ends_as_it_would(
        self, book: Operations, view: AdapterView
    ) -> None:
        begun, may_end = threading.Event(), threading.Event()

        def work(_: Operation) -> AdapterView:
            begun.set()
            assert may_end.wait(30)
            return view

        operation = run(book, work)
        assert begun.wait(30)
        book.cancel(operation.id)
        assert operation.view().state is OperationState.CANCELLING
        may_end.set()
        assert operation.wait(30) == view

    def test_work_that_waits_for_a_thread_never_begins(self, book: Operations, view: AdapterView) -> None:
        busy = [Work(view), Work(view)]
        for work in busy:
            run(book, work)
            assert work.is_begun.wait(30)
        queued = Work(view)
        operation = run(book, queued)
        assert operation.view().stage == "queue"
        book.cancel(operation.id)
        with pytest.raises(CancelledError):
            operation.wait(0)
        for work in busy:
            work.may_end.set()
        eventually(lambda: book.list_operations().total_size == 0)
        assert not queued.is_begun.is_set()

    def test_a_wait_ends_at_once_and_takes_no_last_step(self, book: Operations, view: AdapterView) -> None:
        arrival: Future[None] = pending()
        released: list[DeltaplaneError | None] = []
        steps: list[Operation] = []

        def finish(operation: Operation, _: None) -> AdapterView:
            steps.append(operation)
            return view

        operation = book.follow(
            OperationKind.PIN, "a", arrival, finish, stage=lambda: "room", release=released.append
        )
        book.cancel(operation.id)
        with pytest.raises(CancelledError):
            operation.wait(0)
        arrival.set_result(None)
        run(book, Work.done(view)).wait(30)
        assert steps == []
        assert [type(error) for error in released] == [CancelledError]

    def test_a_deletion_is_not_taken_back(self, book: Operations, view: AdapterView) -> None:
        gone: Future[AdapterView] = pending()
        operation = book.follow(OperationKind.DELETE, "a", gone, lambda _, v: v, stage=lambda: "drain")
        with pytest.raises(FailedPreconditionError, match="a deletion is not taken back"):
            book.cancel(operation.id)
        gone.set_result(view)
        assert operation.wait(30) == view

    def test_the_last_caller_who_leaves_cancels_it(self, book: Operations, view: AdapterView) -> None:
        work = Work(view)
        operation = book.run(OperationKind.REGISTER, "a", work, key="k")
        assert book.joined("k") is operation
        operation.leave()
        assert operation.view().state is OperationState.RUNNING
        operation.leave()
        with pytest.raises(CancelledError, match="callers have gone away"):
            operation.end.result(30)
        assert book.joined("k") is None

    def test_what_is_kept_goes_on_without_callers(self, book: Operations, view: AdapterView) -> None:
        work = Work(view)
        operation = run(book, work)
        operation.keep()
        operation.leave()
        work.may_end.set()
        assert operation.end.result(30) == view

    def test_failing_is_told_once_and_also_afterwards(self, book: Operations, view: AdapterView) -> None:
        told: list[str] = []
        operation = run(book, Work(view))
        operation.when_failing(lambda: told.append("before"))
        book.cancel(operation.id)
        operation.when_failing(lambda: told.append("after"))
        with pytest.raises(CancelledError):
            operation.wait(30)
        good = run(book, Work.done(view))
        good.when_failing(lambda: told.append("never"))
        good.wait(30)
        assert told == ["before", "after"]


class TestBook:
    def test_pages_newest_first(self, view: AdapterView) -> None:
        book = Operations()
        operations = [run(book, Work.done(view), f"a{i % 2}") for i in range(7)]
        for operation in operations:
            operation.keep()
            operation.wait(30)
        ids = [operation.id for operation in reversed(operations)]
        seen: list[str] = []
        token = ""
        for size in (3, 3, 1):
            page = book.list_operations(page_size=3, page_token=token)
            assert (len(page.operations), page.total_size) == (size, 7)
            seen += [shown.id for shown in page.operations]
            token = page.next_page_token
        assert (seen, token) == (ids, "")
        assert [o.id for o in book.list_operations(filter="adapter=a1").operations] == ids[1::2]
        book.close()

    def test_filters(self, book: Operations, view: AdapterView) -> None:
        work = Work(view)
        running = run(book, work)
        ended = book.follow(OperationKind.LOAD, "b", done(None), lambda *_: view, stage=lambda: "")
        ended.keep()
        ended.wait(30)

        def found(filter: str) -> list[str]:
            return [shown.id for shown in book.list_operations(filter=filter).operations]

        assert found("") == [ended.id, running.id]
        assert found("done=false") == found("state=RUNNING") == found("kind=REGISTER") == [running.id]
        assert found("done=true AND adapter=b AND kind=LOAD AND state=SUCCEEDED") == [ended.id]
        assert found("adapter=c") == []
        for bad in ("kind=NONE", "state=running", "done=maybe", "name=a", "adapter:a*"):
            with pytest.raises(InvalidArgumentError) as caught:
                found(bad)
            assert caught.value.violations[0].field == "filter"
        work.may_end.set()
        running.wait(30)

    def test_bad_pages(self, book: Operations, view: AdapterView) -> None:
        for _ in range(2):
            operation = run(book, Work.done(view))
            operation.keep()
            operation.wait(30)
        token = book.list_operations(page_size=1).next_page_token
        other = Operations()
        with pytest.raises(InvalidArgumentError, match="page_size"):
            book.list_operations(page_size=-1)
        with pytest.raises(InvalidArgumentError, match="no token of a list"):
            book.list_operations(page_token="nonsense")
        with pytest.raises(InvalidArgumentError, match="keep the filter"):
            book.list_operations(page_token=token, filter="done=true")
        with pytest.raises(InvalidArgumentError, match="of an earlier run"):
            other.list_operations(page_token=token)
        other.close()

    def test_those_nobody_asked_to_keep_are_forgotten_at_their_end(
        self, book: Operations, view: AdapterView
    ) -> None:
        operation = run(book, Work.done(view))
        operation.wait(30)
        with pytest.raises(NotFoundError, match="it never was, is forgotten, or was of an earlier run"):
            book.get(operation.id)

    def test_those_that_are_kept_are_bounded_in_number_and_time(self, view: AdapterView) -> None:
        now = 1000.0
        book = Operations(lambda: now, OperationLimits(max_ended=3, keep_s=60.0))
        operations = [run(book, Work.done(view)) for _ in range(5)]
        for operation in operations:
            operation.keep()
            operation.wait(30)
        assert book.list_operations().total_size == 3
        now = 1059.0
        assert book.list_operations().total_size == 3
        now = 1061.0
        assert book.list_operations().total_size == 0
        book.check_integrity()
        book.close()

    def test_too_many_at_once_are_refused(self, book: Operations, view: AdapterView) -> None:
        works = [Work(view) for _ in range(4)]
        operations = [run(book, work) for work in works]
        with pytest.raises(ResourceExhaustedError, match="4 operations are under way"):
            run(book, Work(view))
        for work, operation in zip(works, operations, strict=True):
            work.may_end.set()
            operation.wait(30)
        run(book, Work.done(view)).wait(30)

    def test_close_ends_everything(self, view: AdapterView) -> None:
        book = Operations(limits=OperationLimits(threads=1))
        arrival: Future[None] = pending()
        begun = Work(view)
        operations = [
            run(book, begun),
            run(book, Work(view)),
            book.follow(OperationKind.PIN, "a", arrival, lambda *_: view, stage=lambda: "room"),
        ]
        assert begun.is_begun.wait(30)
        closing = time.monotonic()
        book.close()
        assert time.monotonic() - closing < 20
        for operation in operations:
            with pytest.raises(UnavailableError):
                operation.wait(0)
        arrival.set_result(None)
        with pytest.raises(UnavailableError):
            run(book, Work(view))
        book.check_integrity()
        book.close()
