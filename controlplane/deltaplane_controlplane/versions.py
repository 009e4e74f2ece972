"""What the adapter manager knows of an adapter and of its versions. Guarded by the manager's monitor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from deltaplane_controlplane.ports import AdapterManifest, HostAdapter

if TYPE_CHECKING:
    from deltaplane_controlplane.loads import Load

NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Tier(Enum):
    """Where weights can be, apart from their source. A load to the device passes through host memory."""

    HOST = "host"
    DEVICE = "device"

    __hash__ = object.__hash__  # Enum's own is Python, and pins are looked up for each resident version


NO_PINS: frozenset[Tier] = frozenset()


def highest(pins: frozenset[Tier]) -> Tier | None:
    """The tier that matters most: the device, else host memory, else None."""
    return Tier.DEVICE if Tier.DEVICE in pins else next(iter(pins), None)


class AdapterState(Enum):
    """What becomes of a version.

    FETCHING > REGISTERED > LOADING > HOST > RESIDENT > DRAINING > gone; FAILED has a reason and is healed by
    an administrator.
    """

    FETCHING = "FETCHING"
    REGISTERED = "REGISTERED"
    LOADING = "LOADING"
    HOST = "HOST"
    RESIDENT = "RESIDENT"
    DRAINING = "DRAINING"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class LoadTimings:
    """Milliseconds of the stages of a load: waiting for a loader thread, reading, packing, copying.

    end: when the load ended, in seconds since the epoch.
    """

    queue_ms: float = 0.0
    read_ms: float = 0.0
    pack_ms: float = 0.0
    copy_ms: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class Eviction:
    """A version left a tier. time: seconds since the epoch."""

    tier: Tier
    reason: str
    time: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot of the device and the rank pages bound to it."""

    slot: int
    pages: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Version:
    """One set of files under a name. Slots, KV and metrics hang on it, never on the name.

    uid: unique in this process, above 0.
    number: rises with each version of the name and is never used twice for it.
    host: the packed weights, while they are in the host cache.
    placement: its place on the device, from the moment room is reserved.
    resident: whether the weights have arrived there.
    load: the one load under way.
    failure: why the last load failed; None where it did not.

    leases: requests that hold it. running: those whose sequences use it in steps. asking: those that wait
    for it to become resident, alone or together with others. claims: compositions among what those ask for.
    protected: it was loaded for leases that ask, and none of them has had it yet.
    holds: administrators who keep it where it is for a moment.
    kept_pins: where it is pinned while it is not the current version.

    draining: no longer current and not kept; it goes when its last lease ends.
    drain_deadline: when its leases are to be aborted, in seconds of the monotonic clock.
    expelled: that time has come.

    hits, misses: requests that found it resident, and that did not. loads, evictions: to and from the device.
    last_use: when a request last used it, in seconds since the epoch.
    """

    uid: int
    adapter: "Adapter"
    number: int
    manifest: AdapterManifest

    host: HostAdapter | None = None
    placement: Placement | None = None
    resident: bool = False
    load: "Load | None" = None
    failure: str | None = None

    leases: int = 0
    running: int = 0
    asking: int = 0
    claims: int = 0
    protected: bool = False
    holds: int = 0
    kept_pins: frozenset[Tier] = NO_PINS

    draining: bool = False
    drain_deadline: float | None = None
    expelled: bool = False

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    last_use: float | None = None
    last_load: LoadTimings | None = None
    last_eviction: Eviction | None = None

    def __str__(self) -> str:
        return f"{self.adapter.name}@{self.number}"

    @property
    def num_pages(self) -> int:
        """Pages that it takes on the device."""
        return self.manifest.num_pages

    @property
    def pins(self) -> frozenset[Tier]:
        """Where it is pinned: the current version where the adapter is, another where it is itself."""
        return self.adapter.pins if self.adapter.current is self else self.kept_pins

    @property
    def is_forgettable(self) -> bool:
        """Whether nothing needs it any more."""
        return self.draining and self.leases == 0 and self.load is None

    def is_in(self, tier: Tier) -> bool:
        return self.resident if tier is Tier.DEVICE else self.host is not None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where its weights are."""
        host = () if self.host is None else (Tier.HOST,)
        return (*host, Tier.DEVICE) if self.resident else host

    @property
    def state(self) -> AdapterState:
        if self.adapter.fetching:
            return AdapterState.FETCHING
        if self.draining:
            return AdapterState.DRAINING
        if self.resident:
            return AdapterState.RESIDENT
        if self.load is not None:
            return AdapterState.LOADING
        if self.failure is not None:
            return AdapterState.FAILED
        return AdapterState.HOST if self.host is not None else AdapterState.REGISTERED

    @property
    def state_reason(self) -> str:
        """Why it is in its state, for people; empty where there is nothing to say."""
        match self.state:
            case AdapterState.FAILED:
                return self.failure or ""
            case AdapterState.DRAINING:
                return f"requests that end on it: {self.leases}"
            case AdapterState.REGISTERED | AdapterState.HOST if self.asking:
                return f"requests that wait for room on the device: {self.asking}"
            case _:
                return ""


@dataclass(slots=True, eq=False)
class Adapter:
    """A name, its current version and the earlier ones that still exist.

    others: versions that are kept for a rollback or draining, in order of number.
    revision: of the catalogue when an administrator last changed the adapter; its etag.
    pins: where its current version is kept, whichever that is.
    deleted: it is known only until its last lease ends.
    fetching: it is known only to show that its files are on their way; its version is one of no files.
    create_time, update_time: seconds since the epoch.
    """

    name: str
    create_time: float
    update_time: float
    revision: int
    labels: Mapping[str, str]
    pins: frozenset[Tier] = NO_PINS
    deleted: bool = False
    fetching: bool = False
    others: tuple[Version, ...] = ()
    current: Version = field(init=False)

    @property
    def etag(self) -> str:
        return str(self.revision)

    @property
    def state(self) -> AdapterState:
        return self.current.state

    @property
    def manifest(self) -> AdapterManifest:
        return self.current.manifest

    @property
    def versions(self) -> Iterator[Version]:
        """All of its versions, the current one last."""
        yield from self.others
        yield self.current

    def kept(self, number: int) -> Version | None:
        """The version of this number that can be leased or rolled back to, if it is there."""
        return next((v for v in self.versions if v.number == number and not v.draining), None)

    def mark_changed(self, revision: int, now: float) -> None:
        """An administrator changed it."""
        self.revision, self.update_time = revision, now

    def mark_deleted(self, revision: int, now: float) -> None:
        """An administrator deleted it; its versions drain."""
        self.mark_changed(revision, now)
        self.deleted = True
        self.pins = NO_PINS
        for version in self.versions:
            version.draining = True
            version.kept_pins = NO_PINS

    def replace_current(self, version: Version) -> None:
        """Makes a version current, which ends the pins of its own; the one before joins the others."""
        version.kept_pins = NO_PINS
        rest = {v.number: v for v in self.versions if v is not version}
        self.others = tuple(rest[number] for number in sorted(rest))
        self.current = version
