"""A load under way, and the threads that loads run on."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from deltaplane_controlplane.errors import DeltaplaneError, UnavailableError
from deltaplane_controlplane.futures import pending
from deltaplane_controlplane.ports import AdapterManifest, DevicePool, HostAdapter, Progress
from deltaplane_controlplane.versions import LoadTimings, Placement, Tier, Version

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Load:
    """The one load of a version under way; everybody who wants the version shares it.

    tier: where it goes; raised from HOST to DEVICE when somebody asks for more.
    is_recovering, was_recovered: its files were lost; they are, or were, being fetched again.
    waiters: told when the version has reached a tier, or why it did not.
    begun: seconds of the monotonic clock.
    """

    version: Version
    tier: Tier
    waiters: dict[Tier, Future[None]] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    packing_begun: float = 0.0
    is_recovering: bool = False
    was_recovered: bool = False
    copying_begun: float = 0.0
    read_ms: float = 0.0
    pack_ms: float = 0.0

    def waiter(self, tier: Tier) -> Future[None]:
        """Resolves when the version has reached the tier. Cancelling it has no effect on the load."""
        if tier not in self.waiters:
            self.waiters[tier] = pending()
        return self.waiters[tier]

    @property
    def stage(self) -> str:
        """What it does now: "queue", "fetch", "read" (and pack) or "copy"."""
        if self.copying_begun:
            return "copy"
        if self.is_recovering:
            return "fetch"
        return "read" if self.packing_begun else "queue"

    def timings(self, end: float) -> LoadTimings:
        """Of a load that is at its end, which is now: `end`, in seconds since the epoch."""
        now = time.monotonic()
        return LoadTimings(
            queue_ms=1e3 * (self.packing_begun - self.begun) if self.packing_begun else 0.0,
            read_ms=self.read_ms,
            pack_ms=self.pack_ms,
            copy_ms=1e3 * (now - self.copying_begun) if self.copying_begun else 0.0,
            end=end,
        )


class AdapterFiles(Protocol):
    """Brings adapters from their files to host memory. Called from any thread."""

    def pack(self, manifest: AdapterManifest) -> HostAdapter: ...

    def can_recover(self, manifest: AdapterManifest, error: DeltaplaneError) -> bool:
        """Whether an adapter that could not be packed for this reason can be fetched again."""
        ...

    def recover(self, manifest: AdapterManifest, progress: Progress) -> None:
        """Fetches its files again, as they were. Takes its time."""
        ...


class LoadEvents(Protocol):
    """Told of the stages of a load by its threads."""

    def packed(self, load: Load, adapter: HostAdapter) -> None: ...
    def copied(self, load: Load) -> None: ...
    def failed(self, load: Load, reason: str) -> None: ...


class LoadPipeline:
    """Some threads that read and pack, as many that fetch files again that were lost, so that no load waits
    for the network of another, and one that touches the device.

    The device thread works in order of submission: a slot that is cleared and then copied into is cleared
    first, so that the books may give a slot away as soon as its clearing is submitted. No copy waits behind
    the reading of files.
    """

    def __init__(
        self,
        files: AdapterFiles,
        pool: DevicePool,
        events: LoadEvents,
        num_threads: int,
    ) -> None:
        self._files = files
        self._pool = pool
        self._events = events
        self._packers = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-loader")
        self._recoverers = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-recovery")
        self._closing = _Closing()
        self._device = ThreadPoolExecutor(1, thread_name_prefix="adapter-device")

    def pack(self, load: Load) -> None:
        self._packers.submit(self._pack, load)

    def copy(self, load: Load, adapter: HostAdapter, placement: Placement) -> None:
        load.copying_begun = time.monotonic()
        self._device.submit(self._copy, load, adapter, placement)

    def clear(self, slot: int) -> None:
        self._device.submit(self._clear, slot)

    def close_packers(self) -> None:
        """Ends packing: what waits is dropped, what runs is waited for, a fetch gives up."""
        self._closing.begin()
        self._recoverers.shutdown(cancel_futures=True)
        self._packers.shutdown(cancel_futures=True)

    def close_device(self) -> None:
        """Ends the device thread after what was submitted."""
        self._device.shutdown()

    def _pack(self, load: Load) -> None:
        load.packing_begun = load.packing_begun or time.monotonic()
        try:
            adapter = self._files.pack(load.version.manifest)
        except Exception as error:
            if not self._begin_recovery(load, error):
                self._events.failed(load, _reason(error, load.version))
            return
        load.read_ms, load.pack_ms = adapter.read_ms, adapter.pack_ms
        self._events.packed(load, adapter)

    def _begin_recovery(self, load: Load, error: Exception) -> bool:
        """Has lost files fetched again; False where that is of no use, or was tried."""
        if load.was_recovered or not isinstance(error, DeltaplaneError):
            return False
        if not self._files.can_recover(load.version.manifest, error):
            return False
        _log.warning("adapter.files_lost", adapter=str(load.version), reason=error.message)
        load.is_recovering = load.was_recovered = True
        with suppress(RuntimeError):  # closed
            self._recoverers.submit(self._recover, load)
        return True

    def _recover(self, load: Load) -> None:
        try:
            self._files.recover(load.version.manifest, self._closing)
        except Exception as error:
            if not self._closing.has_begun:  # else the load is ended with all others
                self._events.failed(load, _reason(error, load.version))
            return
        load.is_recovering = False
        with suppress(RuntimeError):  # closed
            self._packers.submit(self._pack, load)

    def _copy(self, load: Load, adapter: HostAdapter, placement: Placement) -> None:
        try:
            self._pool.copy_in(placement.slot, placement.pages, adapter)
        except Exception as error:
            self._events.failed(load, f"the copy to the device failed: {_reason(error, load.version)}")
            return
        self._events.copied(load)

    def _clear(self, slot: int) -> None:
        try:
            self._pool.clear(slot)
        except Exception:
            _log.exception("adapter.clear_failed", slot=slot)


class _Closing:
    """Progress of work that goes on until the pipeline is closed."""

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True

    def report(self, stage: str, done: int, total: int | None) -> None:
        pass

    def check(self) -> None:
        if self.has_begun:
            raise UnavailableError("the server is shutting down")


def _reason(error: Exception, version: Version) -> str:
    """Why a load failed, for people. What nobody foresaw is logged with its traceback."""
    if isinstance(error, DeltaplaneError):
        return error.message
    _log.error("adapter.load_crashed", adapter=str(version), exc_info=error)
    return f"{type(error).__name__}: {error}"
