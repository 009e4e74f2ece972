"""Many threads do everything at once: every answer is one that some order of events explains, nothing leaks.

DELTAPLANE_SOAK_SECONDS says how long.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.operation import Operation
from deltaplane_controlplane.operation_views import OperationKind
from deltaplane_controlplane.versions import Tier
from deltaplane_controlplane.views import AdapterView
from fakes import CONFIG

SECONDS = float(os.environ.get("DELTAPLANE_SOAK_SECONDS", "2"))
THREADS = 8
NAMES = ("a", "b", "c", "d", "e", "flaky")
RANKS = (8, 12, 24)

BEGUN = (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
"""What an operation may end with. AbortedError: it was unpinned before it arrived."""


class Worker:
    """One thread of the soak, with leases of its own.

    numbers: what all threads saw: (name, version number) to digest.
    revisions: the last that this thread saw of each name.
    steps: what it does, and the errors that may be the answer.
    """

    def __init__(self, plane: ControlPlane, seed: int, numbers: dict[tuple[str, int], str]) -> None:
        self.plane = plane
        self.draw = random.Random(seed)
        self.numbers = numbers
        self.revisions: dict[str, int] = {}
        self.leases: list[Lease] = []
        self.error: BaseException | None = None
        self.count = 0

    def run(self, end: float) -> None:
        try:
            while time.monotonic() < end and self.error is None:
                self.step()
                self.count += 1
            for lease in self.leases:
                lease.release()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        step, allowed = self.draw.choice(self.steps)
        with contextlib.suppress(*allowed):
            step(self, self.draw.choice(NAMES))

    def source(self, name: str) -> str:
        if self.draw.random() < 0.2:
            return f"fake://{name}"
        return str(self.plane.root / f"{name}-{self.draw.randrange(2)}")

    def tier(self) -> Tier:
        return self.draw.choice((Tier.HOST, Tier.DEVICE))

    def register(self, name: str) -> None:
        view = self.plane.manager.register(name, self.source(name))
        self.saw(view.name, view.version, view.manifest.digest)

    def update(self, name: str) -> None:
        keep = self.draw.random() < 0.3
        self.saw_next(self.plane.manager.update(name, source=self.source(name), keep_previous=keep))

    def rollback(self, name: str) -> None:
        self.saw_next(self.plane.manager.rollback(name))

    def begin(self, name: str) -> None:
        """Begins what takes its time, and goes away, cancels it or waits for it."""
        calls, tier = self.plane.manager.calls, self.tier()
        begin: Sequence[Callable[[], Operation]] = (
            lambda: calls.register(name, self.source(name)),
            lambda: calls.update(name, source=self.source(name)),
            lambda: calls.load(name, tier),
            lambda: calls.pin(name, tier, at_once=self.draw.random() < 0.5),
            lambda: calls.evict(name, tier, when_idle=True),
        )
        operation = self.draw.choice(begin)()
        match self.draw.randrange(4):
            case 0:
                operation.leave()
            case 1:
                operation.keep()
            case 2:
                self.plane.manager.operations.cancel(operation.id)
                operation.wait()
            case _ if operation.kind not in (OperationKind.EVICT, OperationKind.PIN):
                operation.wait(30)
            case _:  # it may wait for what this thread itself holds
                with contextlib.suppress(TimeoutError):
                    operation.wait(0.01)

    def delete(self, name: str) -> None:
        timeout = self.draw.choice((0.0, 0.01, 300.0))
        self.plane.manager.delete(name, drain_timeout_s=timeout, force=self.draw.random() < 0.5)

    def load(self, name: str) -> None:
        self.plane.manager.load(name, self.tier(), timeout_s=30)

    def evict(self, name: str) -> None:
        self.plane.manager.evict(name, self.tier())

    def pin(self, name: str) -> None:
        self.plane.manager.pin(name, self.tier(), wait=self.draw.random() < 0.5)

    def pin_kept(self, name: str) -> None:
        """Pins a version that is kept, or takes its pin away."""
        others = self.plane.manager.get(name).other_versions
        version = self.draw.choice([view.number for view in others] or [0])
        change = self.draw.choice((self.plane.manager.pin, self.plane.manager.unpin))
        change(name, self.tier(), version=version)

    def unpin(self, name: str) -> None:
        self.plane.manager.unpin(name, self.draw.choice((None, *Tier)))

    def lease(self, name: str) -> None:
        if len(self.leases) < 4:
            self.leases.append(self.plane.manager.lease(name))
            self.saw_lease(self.leases[-1])

    def compose(self, name: str) -> None:
        if len(self.leases) < 4:
            names = {name, *self.draw.sample(NAMES, self.draw.randrange(3))}
            weights = {name: self.draw.choice((-0.5, 1.0)) for name in names}
            self.leases.append(self.plane.manager.compose(weights))
            self.saw_lease(self.leases[-1])

    def use(self, name: str) -> None:
        if self.leases:
            lease = self.draw.choice(self.leases)
            slots = lease.activate()
            if slots is not None:
                digests = {member.version.manifest.digest: member.weight for member in lease.members}
                assert self.plane.weights_of(slots) == digests, "another version's weights"

    def fork(self, name: str) -> None:
        if 0 < len(self.leases) < 4:
            self.leases.append(self.draw.choice(self.leases).fork())

    def deactivate(self, name: str) -> None:
        if self.leases:
            self.draw.choice(self.leases).deactivate()

    def release(self, name: str) -> None:
        if self.leases:
            self.leases.pop(self.draw.randrange(len(self.leases))).release()

    def look(self, name: str) -> None:
        self.plane.manager.list_adapters(filter="pinned=false")
        self.plane.manager.capacity()
        self.saw_next(self.plane.manager.get(name))

    def break_files(self, name: str) -> None:
        """Takes the files of one adapter away, or brings them back."""
        config = self.plane.root / "flaky-0" / CONFIG
        away = config.with_name("away")
        try:
            config.rename(away)
        except FileNotFoundError:
            away.rename(config)

    def saw_next(self, view: AdapterView) -> None:
        """What a thread is answered is never older than what it was answered before."""
        self.saw(view.name, view.version, view.manifest.digest)
        if view.version:  # else it is being fetched
            assert int(view.etag) >= self.revisions.get(view.name, 0), f"{view.name} went back in time"
            self.revisions[view.name] = int(view.etag)

    def saw_lease(self, lease: Lease) -> None:
        for version in lease.versions:
            self.saw(version.adapter.name, version.number, version.manifest.digest)

    def saw(self, name: str, number: int, digest: str) -> None:
        assert self.numbers.setdefault((name, number), digest) == digest, f"{name}@{number} is used twice"

    Step = tuple[Callable[["Worker", str], None], tuple[type[Exception], ...]]
    steps: tuple[Step, ...] = (
        (register, (AlreadyExistsError, CancelledError, InvalidArgumentError)),
        (update, (NotFoundError, FailedPreconditionError, InvalidArgumentError)),
        (rollback, (NotFoundError, FailedPreconditionError)),
        (delete, (NotFoundError, FailedPreconditionError)),
        (load, (NotFoundError, FailedPreconditionError, ResourceExhaustedError)),
        (evict, (NotFoundError, FailedPreconditionError)),
        (pin, (NotFoundError, FailedPreconditionError, ResourceExhaustedError)),
        (pin_kept, (NotFoundError, FailedPreconditionError, ResourceExhaustedError)),
        (unpin, (NotFoundError, FailedPreconditionError)),
        *[(begin, BEGUN)] * 3,
        *[(lease, (NotFoundError, FailedPreconditionError))] * 3,
        *[(compose, (NotFoundError, FailedPreconditionError))] * 2,
        *[(use, (FailedPreconditionError,))] * 6,
        (fork, ()),
        (deactivate, ()),
        *[(release, ())] * 2,
        (look, (NotFoundError,)),
        (break_files, (FileNotFoundError,)),
    )


def test_soak(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=3, num_pages=7, host_bytes=450) as plane:
        for index, name in enumerate(NAMES):
            for variant in range(2):
                rank = RANKS[(index + variant) % len(RANKS)]
                plane.folder(f"{name}-{variant}", rank=rank, nbytes=rank * 10)
        numbers: dict[tuple[str, int], str] = {}
        workers = [Worker(plane, seed, numbers) for seed in range(THREADS)]
        end = time.monotonic() + SECONDS
        threads = [threading.Thread(target=worker.run, args=(end,)) for worker in workers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            plane.manager.check_integrity()
            time.sleep(0.01)
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        assert sum(worker.count for worker in workers) > 100 * THREADS
        assert plane.pool.copies > THREADS
        _empty(plane)


def _empty(plane: ControlPlane) -> None:
    """Deletes everything; nothing may be left."""
    for view in plane.manager.list_adapters().adapters:
        try:
            plane.manager.delete(view.name, force=True)
        except NotFoundError:
            assert view.state.name == "DRAINING"
    eventually(lambda: plane.manager.list_adapters().total_size == 0, "the end of all adapters")
    capacity = plane.manager.capacity()
    assert (capacity.free_slots, capacity.free_rank_pages, capacity.host.used_bytes) == (3, 7, 0)
    plane.settle()
    assert plane.pool.bound == {}
    assert not plane.manager.stats().waiting
