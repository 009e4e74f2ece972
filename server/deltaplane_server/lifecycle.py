"""Where a server is in its life, as the HTTP checks tell it. Read from any thread."""

from enum import Enum


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Lifecycle:
    """STARTING > SERVING > DRAINING; a failure, once there, stays.

    failure: why the server cannot go on; None while it can.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.failure: str | None = None

    def alive(self) -> str | None:
        """None while the process is worth keeping, else why not."""
        return self.failure

    def ready(self) -> str | None:
        """None while requests are taken, else why not."""
        return self.failure or (None if self.phase is Phase.SERVING else self.phase.value)
