"""What each kind of remote host answers: where an adapter's files are, and what to call that for good."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.remote.addresses import Address
from deltaplane_server.adapters.remote.transfer import RemoteFile


@dataclass(frozen=True, slots=True)
class FileBounds:
    """The most bytes of each file."""

    max_config_bytes: int
    max_weights_bytes: int

    def items(self) -> Sequence[tuple[str, int]]:
        """Names of an adapter's files and their bounds, in the order in which they are fetched."""
        return (CONFIG_FILE, self.max_config_bytes), (WEIGHTS_FILE, self.max_weights_bytes)


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """source: its address, resolved as far as the host knows how to. files: in the order of FileBounds."""

    source: str
    files: Sequence[RemoteFile]


class RemoteHost(Protocol):
    """One kind of place for adapters."""

    async def resolve(self, address: Address) -> RemoteAdapter:
        """Where the files of an allowed address are now.

        Errors: InvalidArgumentError (SOURCE_NOT_READABLE), FailedPreconditionError (this server is not set up
        for it), TryAgainError.
        """
        ...
