"""Tells of what happens to adapters: an event for watchers and a log line, one each."""

from collections.abc import Callable
from typing import Any

import structlog

from deltaplane_controlplane.events import EventLog, EventType
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.versions import Adapter, Tier, Version
from deltaplane_controlplane.views import AdapterView

_log = structlog.get_logger(__name__)

_LEVELS = {EventType.LOADING: "debug", EventType.FAILED: "warning"}


class Journal:
    """Writes events while the monitor is held, in the order of the changes, and log lines after it.

    view: makes the picture of an adapter.
    """

    def __init__(
        self,
        monitor: Monitor,
        events: EventLog,
        view: Callable[[Adapter], AdapterView],
        clock: Callable[[], float],
    ) -> None:
        self._monitor = monitor
        self._events = events
        self._view = view
        self._clock = clock

    def record(
        self, kind: EventType, version: Version, reason: str = "", *, tier: Tier | None = None
    ) -> None:
        """Tells of a change of a version. The monitor is held."""
        self._events.append(kind, self._view(version.adapter), version.number, reason, self._clock())
        self._monitor.after(self._events.notify)
        log = getattr(_log, _LEVELS.get(kind, "info"))
        self._monitor.after(log, f"adapter.{kind.value}", **_facts(kind, version, reason, tier))


def _facts(kind: EventType, version: Version, reason: str, tier: Tier | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"adapter": version.adapter.name, "version": version.number}
    if reason:
        facts["reason"] = reason
    if tier is not None:
        facts["tier"] = tier.value
    if kind in (EventType.REGISTERED, EventType.UPDATED):
        manifest = version.manifest
        facts |= {"rank": manifest.rank, "digest": manifest.digest, "source": manifest.source}
    if kind is EventType.LOADED and version.last_load is not None:
        timings = version.last_load
        facts |= {
            "queue_ms": round(timings.queue_ms, 3),
            "read_ms": round(timings.read_ms, 3),
            "pack_ms": round(timings.pack_ms, 3),
            "copy_ms": round(timings.copy_ms, 3),
        }
    if kind is EventType.LOADED and tier is Tier.DEVICE and version.placement is not None:
        facts |= {"slot": version.placement.slot, "pages": version.placement.pages}
    return facts
