"""What each kind of remote host answers: where an adapter's files are, and what to call that for good."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.remote.addresses import Address
from deltaplane_server.adapters.remote.transfer import FileRequest, RemoteFile


@dataclass(frozen=True, slots=True)
class FileBounds:
    """The most bytes of each file."""

    max_config_bytes: int
    max_weights_bytes: int

    def files(
        self,
        shown: Callable[[str], str],
        locate: Callable[[str], Awaitable[FileRequest]],
        redirect: Callable[[str], str | None],
    ) -> list[RemoteFile]:
        """An adapter's files, in the order in which they are fetched. See RemoteFile; shown and locate are
        given the name of a file."""
        bounds = {CONFIG_FILE: self.max_config_bytes, WEIGHTS_FILE: self.max_weights_bytes}
        return [
            RemoteFile(name, shown(name), max_bytes, partial(locate, name), redirect)
            for name, max_bytes in bounds.items()
        ]


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
