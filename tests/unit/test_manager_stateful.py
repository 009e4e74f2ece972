"""Any order of calls keeps the books right: a state machine over real threads."""

import contextlib
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from control_plane import ControlPlane
from deltaplane_controlplane.errors import (
    AlreadyExistsError,
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.versions import AdapterState, Tier
from fakes import CONFIG

NAMES = st.sampled_from(("a", "b", "c", "d"))
FILES = st.sampled_from(("small", "middle", "large"))
TIERS = st.sampled_from(Tier)
WEIGHTS = st.sampled_from((0.5, 1.0))
REFUSED = (FailedPreconditionError, NotFoundError, ResourceExhaustedError)


class AdapterManagerMachine(RuleBasedStateMachine):
    """Three slots, six rank pages, 300 bytes of host memory: everything is scarce.

    numbers: the highest version number that each name has had.
    """

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.plane = self.stack.enter_context(ControlPlane(folder, num_slots=3, num_pages=6, host_bytes=300))
        self.manager = self.plane.manager
        self.sources = {
            "small": self.plane.folder("small", rank=8, nbytes=80),
            "middle": self.plane.folder("middle", rank=16, nbytes=120),
            "large": self.plane.folder("large", rank=32, nbytes=200),
        }
        self.numbers: dict[str, int] = {}
        self.held: list[Lease] = []

    def teardown(self) -> None:
        for lease in self.held:
            lease.release()
        self.stack.close()

    def saw(self, name: str, number: int) -> None:
        self.numbers[name] = max(number, self.numbers.get(name, 0))

    def has_files(self, files: str) -> bool:
        return Path(self.sources[files], CONFIG).exists()

    @rule(name=NAMES, files=FILES)
    def register(self, name: str, files: str) -> None:
        known = {view.name: view for view in self.manager.list_adapters().adapters}.get(name)
        try:
            view = self.manager.register(name, self.sources[files])
        except AlreadyExistsError:
            assert known is not None
            assert known.state is not AdapterState.FAILED
            return
        except InvalidArgumentError:
            assert not self.has_files(files)
            return
        if known is None:
            assert view.version == self.numbers.get(name, 0) + 1
        self.saw(name, view.version)

    @rule(name=NAMES, files=FILES, keep=st.booleans())
    def update(self, name: str, files: str, keep: bool) -> None:
        with contextlib.suppress(NotFoundError):
            before = self.manager.get(name)
            try:
                view = self.manager.update(name, source=self.sources[files], keep_previous=keep)
            except InvalidArgumentError:
                assert not self.has_files(files)
                return
            changed = before.manifest.digest != view.manifest.digest
            assert view.version == (self.numbers[name] + 1 if changed else before.version)
            self.saw(name, view.version)

    @rule(name=NAMES)
    def rollback(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):
            self.manager.rollback(name)

    @rule(name=NAMES, force=st.booleans())
    def delete(self, name: str, force: bool) -> None:
        with contextlib.suppress(*REFUSED):
            self.manager.delete(name, force=force)

    @rule(name=NAMES, tier=TIERS)
    def load(self, name: str, tier: Tier) -> None:
        with contextlib.suppress(*REFUSED):
            self.manager.load(name, tier, timeout_s=30)

    @rule(name=NAMES, tier=TIERS)
    def evict(self, name: str, tier: Tier) -> None:
        with contextlib.suppress(*REFUSED):
            view = self.manager.evict(name, tier)
            assert view.slot is None

    @rule(name=NAMES, tier=TIERS, wait=st.booleans())
    def pin(self, name: str, tier: Tier, wait: bool) -> None:
        with contextlib.suppress(*REFUSED):
            view = self.manager.pin(name, tier, wait=wait)
            assert tier in view.pins
            assert not wait or view.state in (AdapterState.RESIDENT, AdapterState.HOST)

    @rule(name=NAMES, tier=TIERS | st.none())
    def unpin(self, name: str, tier: Tier | None) -> None:
        with contextlib.suppress(NotFoundError):
            view = self.manager.unpin(name, tier)
            assert not view.pins if tier is None else tier not in view.pins

    @rule(name=NAMES, tier=TIERS, version=st.integers(1, 6), pins=st.booleans())
    def pin_kept(self, name: str, tier: Tier, version: int, pins: bool) -> None:
        with contextlib.suppress(*REFUSED):
            view = (self.manager.pin if pins else self.manager.unpin)(name, tier, version=version)
            (kept,) = [other for other in view.other_versions if other.number == version]
            assert (tier in kept.pins) is pins
            assert not pins or tier in kept.tiers

    @rule(name=NAMES, tier=TIERS)
    def evict_when_idle(self, name: str, tier: Tier) -> None:
        """Whatever is evicted then is not in use; what is in use stays, and nobody waits for it any more."""
        with contextlib.suppress(*REFUSED, CancelledError):
            operation = self.manager.calls.evict(name, tier, when_idle=True)
            self.plane.settle()
            operation.leave()
            assert operation.end.result(30).slot is None

    @rule(target=leases, name=NAMES)
    def lease(self, name: str) -> Lease | None:
        try:
            self.held.append(self.manager.lease(name))
        except (NotFoundError, FailedPreconditionError):
            return None
        return self.held[-1]

    @rule(target=leases, names=st.lists(NAMES, min_size=1, max_size=3, unique=True), weight=WEIGHTS)
    def compose(self, names: list[str], weight: float) -> Lease | None:
        try:
            self.held.append(self.manager.compose(dict.fromkeys(names, weight)))
        except (NotFoundError, FailedPreconditionError):
            return None
        return self.held[-1]

    @rule(lease=leases)
    def activate(self, lease: Lease | None) -> None:
        if lease is not None:
            with contextlib.suppress(FailedPreconditionError):
                slot = lease.activate()
                assert slot == lease.slot

    @rule(lease=leases)
    def deactivate(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.deactivate()

    @rule(target=leases, lease=leases)
    def fork(self, lease: Lease | None) -> Lease | None:
        if lease is None:
            return None
        self.held.append(lease.fork())
        return self.held[-1]

    @rule(lease=consumes(leases))
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            self.held.remove(lease)
            lease.release()

    @rule(files=FILES)
    def lose_files(self, files: str) -> None:
        """The files go, or come back."""
        config = Path(self.sources[files], CONFIG)
        away = config.with_name("away")
        if self.has_files(files):
            config.rename(away)
        else:
            away.rename(config)

    @rule(broken=st.booleans())
    def break_device(self, broken: bool) -> None:
        self.plane.pool.fail_copies = broken

    @invariant()
    def the_books_are_right(self) -> None:
        self.plane.settle()
        self.manager.check_integrity()
        for lease in self.held:
            if lease.slot is not None:
                digests = {member.version.manifest.digest: member.weight for member in lease.members}
                assert self.plane.weights_of(lease.slot) == digests
        views = self.manager.list_adapters().adapters
        leases = sum(view.leases + sum(v.leases for v in view.other_versions) for view in views)
        assert leases == sum(len(lease.members) for lease in self.held)
        capacity = self.manager.capacity()
        assert capacity.host.used_bytes <= 300
        assert capacity.free_slots == 3 - len(self.plane.pool.bound)


AdapterManagerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAdapterManager = AdapterManagerMachine.TestCase
