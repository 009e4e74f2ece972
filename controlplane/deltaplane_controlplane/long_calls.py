"""The calls of administrators that take their time: each begins an operation."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from deltaplane_controlplane.administration import Administration
from deltaplane_controlplane.admission import Admission, check_labels, check_name
from deltaplane_controlplane.books import Books
from deltaplane_controlplane.errors import (
    DeltaplaneError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from deltaplane_controlplane.futures import done
from deltaplane_controlplane.idempotency import IdempotencyCache
from deltaplane_controlplane.operation import Operation
from deltaplane_controlplane.operation_views import OperationKind
from deltaplane_controlplane.operations import Operations
from deltaplane_controlplane.pinning import Pinning
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.registry import no_version
from deltaplane_controlplane.versions import NO_LABELS, Tier, Version
from deltaplane_controlplane.views import AdapterView

DEFAULT_DRAIN_TIMEOUT_S = 300.0
MAX_DRAIN_TIMEOUT_S = 86_400.0


class LongCalls:
    """Begins operations. Each answers at once, with an operation that has one caller: who began it must wait
    for it, leave it or keep it (see Operation). What is wrong with a call at once is raised at once.

    answers: remembers the operations of the callers who send idempotency keys.
    """

    def __init__(
        self,
        books: Books,
        *,
        admission: Admission,
        administration: Administration,
        pinning: Pinning,
        operations: Operations,
        answers: IdempotencyCache[Any],
    ) -> None:
        self._monitor = books.monitor
        self._registry = books.registry
        self._residency = books.residency
        self._reports = books.reports
        self._admission = admission
        self._administration = administration
        self._pinning = pinning
        self._operations = operations
        self._answers = answers

    def register(
        self,
        name: str,
        source: str,
        *,
        labels: Mapping[str, str] = NO_LABELS,
        expected_digest: str = "",
        validate_only: bool = False,
        load_tier: Tier | None = None,
        idempotency_key: str = "",
        is_shown: bool = False,
    ) -> Operation:
        """Fetches an adapter's files where they are remote, checks them and makes it known. Equal calls at
        the same time are one.

        is_shown: the adapter is shown as FETCHING meanwhile, as it always is where its source is remote.
        The operation's errors: see AdapterManager.register.
        """
        check_name(name)
        check_labels(labels)
        source = self._admission.check_source(source)

        def work(operation: Operation) -> AdapterView:
            manifest = self._admission.inspect(source, expected_digest, progress=operation)
            view = self._admission.settle(
                manifest,
                lambda: self._administration.admit(
                    name, manifest, labels, validate_only=validate_only, check=operation.check
                ),
                validate_only=validate_only,
            )
            return view if validate_only else self.load_at_once(view, load_tier)

        request = ("register", name, source, frozen(labels), expected_digest, load_tier)
        return self._once(
            "" if validate_only else idempotency_key,
            request,
            lambda: self._run(
                OperationKind.REGISTER, name, source, work, (*request, validate_only), validate_only, is_shown
            ),
        )

    def update(
        self,
        name: str,
        *,
        source: str | None = None,
        labels: Mapping[str, str] | None = None,
        etag: str = "",
        expected_digest: str = "",
        validate_only: bool = False,
        keep_previous: bool = False,
        idempotency_key: str = "",
        is_shown: bool = False,
    ) -> Operation:
        """Fetches and checks an adapter's new files, which then take over, and changes its labels.

        is_shown: as in `register`, by an event.
        The operation's errors: see AdapterManager.update.
        """
        check_labels(labels or NO_LABELS, "adapter.labels")
        if source is None and labels is None:
            raise InvalidArgumentError.for_field("update_mask", "nothing to change: set source or labels")
        if source is not None:
            source = self._admission.check_source(source, "adapter.source")

        def work(operation: Operation) -> AdapterView:
            self._administration.find(name, etag)

            def change(manifest: AdapterManifest | None) -> AdapterView:
                return self._administration.change(
                    name,
                    manifest,
                    labels,
                    etag=etag,
                    keep=keep_previous,
                    validate_only=validate_only,
                    check=operation.check,
                )

            if source is None:
                return change(None)
            manifest = self._admission.inspect(source, expected_digest, "adapter.source", progress=operation)
            return self._admission.settle(manifest, partial(change, manifest), validate_only=validate_only)

        request = ("update", name, source, frozen(labels), etag, expected_digest, keep_previous)
        return self._once(
            "" if validate_only else idempotency_key,
            request,
            lambda: self._run(OperationKind.UPDATE, name, source or "", work, None, validate_only, is_shown),
        )

    def delete(
        self,
        name: str,
        *,
        etag: str = "",
        drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S,
        force: bool = False,
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> tuple[AdapterView, Operation | None]:
        """Lets an adapter drain. Answers it as it is, and the operation that ends when it is gone, callers or
        not; None where it is gone already.

        Errors: see AdapterManager.delete.
        """
        if not 0 <= drain_timeout_s <= MAX_DRAIN_TIMEOUT_S:
            raise InvalidArgumentError.for_field(
                "drain_timeout", f"{drain_timeout_s:g} s is not between 0 and {MAX_DRAIN_TIMEOUT_S:g} s"
            )

        def act() -> tuple[AdapterView, Operation | None]:
            self._operations.check_room()
            view, gone = self._administration.delete(
                name, etag=etag, drain_timeout_s=drain_timeout_s, force=force, validate_only=validate_only
            )
            if gone.done():
                return view, None
            operation = self._operations.follow(
                OperationKind.DELETE, name, gone, lambda _, last: last, stage=lambda: "drain"
            )
            operation.keep()
            return replace(view, operation=operation.id), operation

        request = ("delete", name, etag, drain_timeout_s, force)
        answer: tuple[AdapterView, Operation | None] = self._answers.once(
            "" if validate_only else idempotency_key, request, act
        )
        return answer

    def load(
        self,
        name: str,
        tier: Tier = Tier.DEVICE,
        *,
        version: int | None = None,
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> Operation:
        """Brings the current version of an adapter, or a kept one, to a tier. Cancelling it does not end the
        load, which others may wait for.

        Errors: NotFoundError; the operation's: see AdapterManager.load.
        """

        def act() -> Operation:
            self._operations.check_room()
            with self._monitor:
                found = self._version(name, version)
                if validate_only:
                    self._residency.check_load(found, tier)
                    arrival = done(None)
                else:
                    arrival = self._residency.start_load(found, tier)
            return self._follow(OperationKind.LOAD, found, arrival)

        request = ("load", name, tier, version)
        return self._once("" if validate_only else idempotency_key, request, act)

    def pin(
        self,
        name: str,
        tier: Tier = Tier.DEVICE,
        *,
        at_once: bool = False,
        version: int | None = None,
        etag: str = "",
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> Operation:
        """Brings an adapter, or a kept version, to a tier and keeps it there.

        at_once: the pin is made now, and the operation ends when the adapter has arrived. Else the pin is
            made when it has, and nothing is changed where the operation fails or is cancelled.
        Errors: see AdapterManager.pin.
        """

        def act() -> Operation:
            self._operations.check_room()
            if validate_only:
                view = self._pinning.check(name, tier, number=version, etag=etag)
                return self._follow_view(OperationKind.PIN, view)
            if at_once:
                _, pinned, arrival = self._pinning.pin(name, tier, number=version, etag=etag)
                return self._follow(OperationKind.PIN, pinned, arrival)
            held, arrival = self._pinning.hold(name, tier, number=version, etag=etag)
            return self._operations.follow(
                OperationKind.PIN,
                name,
                arrival,
                lambda operation, _: self._pinning.pin(
                    name, tier, number=version, etag=etag, check=operation.check
                )[0],
                stage=lambda: _stage(held),
                release=lambda _: self._pinning.end_hold(held),
            )

        request = ("pin", name, tier, at_once, version, etag)
        return self._once("" if validate_only else idempotency_key, request, act)

    def evict(
        self,
        name: str,
        tier: Tier = Tier.DEVICE,
        *,
        when_idle: bool = False,
        version: int | None = None,
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> Operation:
        """Takes the current version of an adapter, or another one that is there, out of a tier: now, or as
        soon as nothing uses it. Cancelling it leaves it where it is.

        Errors: see AdapterManager.evict.
        """

        def act() -> Operation:
            self._operations.check_room()
            with self._monitor:
                found = self._version(name, version, may_drain=True)
                end: Future[None] = done(None)
                if validate_only:
                    self._residency.check_evict(found, tier)
                elif when_idle:
                    end = self._residency.evict_when_idle(found, tier)
                else:
                    self._residency.evict(found, tier)
            return self._operations.follow(
                OperationKind.EVICT,
                name,
                end,
                lambda *_: self._reports.get(name),
                stage=lambda: "idle",
                release=lambda _: self._stop_evicting(end),
            )

        request = ("evict", name, tier, when_idle, version)
        return self._once("" if validate_only else idempotency_key, request, act)

    def load_at_once(self, view: AdapterView, tier: Tier | None) -> AdapterView:
        """Begins to bring an adapter to a tier, if there is one to bring it to, and answers it as it is then.
        It stays cold where what is pinned leaves no room."""
        if tier is None:
            return view
        with suppress(ResourceExhaustedError), self._monitor:
            self._residency.start_load(self._registry.get(view.name).current, tier)
        return self._reports.get(view.name)

    def begun(self, operation: Operation, source: str = "") -> AdapterView:
        """What a call that returns at once answers: the adapter as it is, with the operation. One that is not
        there yet is shown as being fetched from `source`."""
        try:
            view = self._reports.get(operation.adapter)
        except NotFoundError:
            view = self._reports.fetching(operation.adapter, source)
        return replace(view, operation=operation.id)

    def _run(
        self,
        kind: OperationKind,
        name: str,
        source: str,
        work: Callable[[Operation], AdapterView],
        key: Hashable,
        validate_only: bool,
        is_shown: bool,
    ) -> Operation:
        joined = self._operations.joined(key) if key is not None else None
        if joined is not None:
            return joined
        is_remote = bool(source) and self._admission.is_remote(source)
        if validate_only or not source or not (is_remote or is_shown):
            return self._operations.run(kind, name, work, key=key, is_fetch=is_remote)
        shown = self._administration.begin_fetch(name, source)
        with _undone_by(shown):
            return self._operations.run(kind, name, work, key=key, is_fetch=is_remote, release=shown)

    def _once(self, key: str, request: Hashable, begin: Callable[[], Operation]) -> Operation:
        """Begins an operation, or answers the one that this key began before, with one more caller."""
        begun: list[Operation] = []

        def act() -> Operation:
            begun.append(begin())
            return begun[0]

        operation: Operation = self._answers.once(key, request, act)
        if not begun:
            operation.join()
        elif key:
            operation.when_failing(lambda: self._answers.forget(key))
        return operation

    def _follow(self, kind: OperationKind, version: Version, arrival: "Future[None]") -> Operation:
        """Ends with the adapter as it is when its version has arrived."""
        name = version.adapter.name
        return self._operations.follow(
            kind, name, arrival, lambda *_: self._reports.get(name), stage=lambda: _stage(version)
        )

    def _follow_view(self, kind: OperationKind, view: AdapterView) -> Operation:
        """Ends at once, with this adapter."""
        return self._operations.follow(kind, view.name, done(view), lambda _, same: same, stage=lambda: "")

    def _version(self, name: str, number: int | None, *, may_drain: bool = False) -> Version:
        """The current version, or the one of a number; the monitor is held. Errors: NotFoundError."""
        adapter = self._registry.get(name)
        if number is None:
            return adapter.current
        version = adapter.kept(number) or next(
            (v for v in adapter.versions if may_drain and v.number == number), None
        )
        if version is None:
            raise no_version(adapter, number)
        return version

    def _stop_evicting(self, end: "Future[None]") -> None:
        with self._monitor:
            self._residency.stop_evicting(end)


def frozen(labels: Mapping[str, str] | None) -> tuple[tuple[str, str], ...] | None:
    """Labels as a part of a request that is compared."""
    return None if labels is None else tuple(sorted(labels.items()))


def _stage(version: Version) -> str:
    """How far a version is on its way to a tier."""
    load = version.load
    return "room" if load is None else load.stage


@contextmanager
def _undone_by(undo: Callable[[DeltaplaneError | None], None]) -> Iterator[None]:
    try:
        yield
    except DeltaplaneError as error:
        undo(error)
        raise
