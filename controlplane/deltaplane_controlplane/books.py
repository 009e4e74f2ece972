"""What the parts of an adapter manager share."""

from collections.abc import Callable
from dataclasses import dataclass

from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.journal import Journal
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.registry import Registry
from deltaplane_controlplane.reports import Reports
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.turn import Turn


@dataclass(frozen=True, slots=True)
class Books:
    """The state of a manager, and what every change of it needs.

    monitor: guards the registry and the residency.
    registry, residency: which adapters there are, and where their weights are.
    reports: shows them. journal: tells of what happens to them.
    turn: held while administrators change them. catalogue: what of that outlives the process.
    clock: seconds since the epoch.
    """

    monitor: Monitor
    registry: Registry
    residency: Residency
    reports: Reports
    journal: Journal
    turn: Turn
    catalogue: Catalogue
    clock: Callable[[], float]
