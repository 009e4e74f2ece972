"""What an operation is to those who ask: its kind, its state, its picture."""

from dataclasses import dataclass
from enum import Enum

from deltaplane_controlplane.errors import DeltaplaneError
from deltaplane_controlplane.views import AdapterView


class OperationKind(Enum):
    """Which call it is (see OperationKind in operations.proto)."""

    REGISTER = "register"
    UPDATE = "update"
    LOAD = "load"
    PIN = "pin"
    EVICT = "evict"
    DELETE = "delete"


class OperationState(Enum):
    """What becomes of it (see OperationState in operations.proto)."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class OperationView:
    """An operation as it is. total_bytes: None where nobody knows. Times are seconds since the epoch.

    result: the adapter or the error; None while it is under way.
    """

    id: str
    kind: OperationKind
    adapter: str
    state: OperationState
    stage: str
    done_bytes: int
    total_bytes: int | None
    create_time: float
    end_time: float | None
    result: AdapterView | DeltaplaneError | None


@dataclass(frozen=True, slots=True)
class OperationPage:
    """A page of a list. total_size: how many operations the filter lets through on all pages."""

    operations: tuple[OperationView, ...]
    next_page_token: str
    total_size: int
