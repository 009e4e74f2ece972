"""A load under way, and the threads that loads run on."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from deltaplane_controlplane.errors import DeltaplaneError
from deltaplane_controlplane.ports import AdapterManifest, DevicePool, HostAdapter
from deltaplane_controlplane.versions import LoadTimings, Placement, Tier, Version

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Load:
    """The one load of a version under way; everybody who wants the version shares it.

    tier: where it goes; raised from HOST to DEVICE when somebody asks for more.
    waiters: told when the version has reached a tier, or why it did not.
    begun: seconds of the monotonic clock.
    """

    version: Version
    tier: Tier
    waiters: dict[Tier, Future[None]] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    packing_begun: float = 0.0
    copying_begun: float = 0.0
    read_ms: float = 0.0
    pack_ms: float = 0.0

    def waiter(self, tier: Tier) -> Future[None]:
        """Resolves when the version has reached the tier. Cancelling it has no effect on the load."""
        if tier not in self.waiters:
            self.waiters[tier] = pending()
        return self.waiters[tier]

    def timings(self) -> LoadTimings:
        """Of a load that is at its end."""
        now = time.monotonic()
        return LoadTimings(
            queue_ms=1e3 * (self.packing_begun - self.begun) if self.packing_begun else 0.0,
            read_ms=self.read_ms,
            pack_ms=self.pack_ms,
            copy_ms=1e3 * (now - self.copying_begun) if self.copying_begun else 0.0,
        )


def pending() -> Future[None]:
    """A future that its waiters cannot cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


class LoadEvents(Protocol):
    """Told of the stages of a load by its threads."""

    def packed(self, load: Load, adapter: HostAdapter) -> None: ...
    def copied(self, load: Load) -> None: ...
    def failed(self, load: Load, reason: str) -> None: ...


class LoadPipeline:
    """Some threads that read and pack, and one that touches the device.

    The device thread works in order of submission: a slot that is cleared and then copied into is cleared
    first, so that the books may give a slot away as soon as its clearing is submitted. No copy waits behind
    the reading of files.
    """

    def __init__(
        self,
        pack: Callable[[AdapterManifest], HostAdapter],
        pool: DevicePool,
        events: LoadEvents,
        num_threads: int,
    ) -> None:
        self._pack_files = pack
        self._pool = pool
        self._events = events
        self._packers = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-loader")
        self._device = ThreadPoolExecutor(1, thread_name_prefix="adapter-device")

    def pack(self, load: Load) -> None:
        self._packers.submit(self._pack, load)

    def copy(self, load: Load, adapter: HostAdapter, placement: Placement) -> None:
        load.copying_begun = time.monotonic()
        self._device.submit(self._copy, load, adapter, placement)

    def clear(self, slot: int) -> None:
        self._device.submit(self._clear, slot)

    def close_packers(self) -> None:
        """Ends packing: what waits is dropped, what runs is waited for."""
        self._packers.shutdown(cancel_futures=True)

    def close_device(self) -> None:
        """Ends the device thread after what was submitted."""
        self._device.shutdown()

    def _pack(self, load: Load) -> None:
        load.packing_begun = time.monotonic()
        try:
            adapter = self._pack_files(load.version.manifest)
        except Exception as error:
            self._events.failed(load, _reason(error, load.version))
            return
        load.read_ms, load.pack_ms = adapter.read_ms, adapter.pack_ms
        self._events.packed(load, adapter)

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


def _reason(error: Exception, version: Version) -> str:
    """Why a load failed, for people. What nobody foresaw is logged with its traceback."""
    if isinstance(error, DeltaplaneError):
        return error.message
    _log.error("adapter.load_crashed", adapter=str(version), exc_info=error)
    return f"{type(error).__name__}: {error}"
