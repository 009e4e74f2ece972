"""The end of deleted adapters: requests under way may go on until a deadline."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import structlog

from deltaplane_controlplane.deadlines import Deadlines
from deltaplane_controlplane.futures import pending
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.versions import Adapter, Version
from deltaplane_controlplane.views import AdapterView

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Deletion:
    """An adapter on its way out. view: how it was last seen. versions: those that are still there."""

    adapter: Adapter
    view: AdapterView
    versions: set[Version]
    gone: Future[AdapterView] = field(default_factory=pending)


class Drains:
    """Lets the versions of deleted adapters drain, and expels what still holds them at the deadline."""

    def __init__(self, monitor: Monitor, residency: Residency) -> None:
        self._monitor = monitor
        self._residency = residency
        self._deadlines = Deadlines()
        self._deletions: list[_Deletion] = []

    def begin(
        self, adapter: Adapter, view: AdapterView, timeout_s: float, *, again: bool = False
    ) -> Future[AdapterView]:
        """All versions of an adapter go: those that nobody leases now, the others until the timeout has
        passed. Those that drain with a timeout already keep theirs, unless this is to set a new one
        (`again`). The monitor is held.

        view: the adapter as it is. The answer is how it was when the last of its versions went.
        """
        deletion = _Deletion(adapter, view, set(adapter.versions))
        self._deletions.append(deletion)
        versions = tuple(v for v in adapter.versions if again or v.drain_deadline is None)
        deadline = time.monotonic() + timeout_s
        for version in versions:
            version.drain_deadline = deadline
            self._residency.retire(version)
        if any(version.leases for version in versions):
            self._monitor.after(self._deadlines.at, deadline, partial(self._expel, versions, deadline))
        return deletion.gone

    def note_gone(self, version: Version, view: AdapterView) -> None:
        """A version is gone, and its adapter looks like this. The monitor is held."""
        for deletion in [d for d in self._deletions if version in d.versions]:
            deletion.versions.discard(version)
            if version.adapter is deletion.adapter:  # else its name was registered anew meanwhile
                deletion.view = view
            if not deletion.versions:
                self._deletions.remove(deletion)
                self._monitor.after(deletion.gone.set_result, deletion.view)

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
