"""The end of deleted adapters: requests under way may go on until a deadline."""

import time
from functools import partial

import structlog

from deltaplane_controlplane.deadlines import Deadlines
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.versions import Adapter, Version

_log = structlog.get_logger(__name__)


class Drains:
    """Lets the versions of deleted adapters drain, and expels what still holds them at the deadline."""

    def __init__(self, monitor: Monitor, residency: Residency) -> None:
        self._monitor = monitor
        self._residency = residency
        self._deadlines = Deadlines()

    def begin(self, adapter: Adapter, timeout_s: float, *, again: bool = False) -> None:
        """All versions of an adapter go: those that nobody leases now, the others until the timeout has
        passed. Those that drain with a timeout already keep theirs, unless this is to set a new one
        (`again`). The monitor is held."""
        versions = tuple(v for v in adapter.versions if again or v.drain_deadline is None)
        deadline = time.monotonic() + timeout_s
        for version in versions:
            version.drain_deadline = deadline
            self._residency.retire(version)
        if any(version.leases for version in versions):
            self._monitor.after(self._deadlines.at, deadline, partial(self._expel, versions, deadline))

    def close(self) -> None:
        self._deadlines.close()

    def _expel(self, versions: tuple[Version, ...], deadline: float) -> None:
        with self._monitor:
            for version in versions:
                if version.drain_deadline == deadline and version.leases:
                    self._monitor.after(
                        _log.warning, "adapter.expelled", adapter=str(version), leases=version.leases
                    )
                    self._residency.expel(version)
