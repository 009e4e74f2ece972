"""Reads an adapter's files: regular ones inside its folder, in bounds, each byte once and into its digest."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.ports import NO_LINKS, Links
from deltaplane_server.adapters.load_threads import LoadThreads
from deltaplane_server.adapters.unservable import unservable

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

LENGTH_BYTES = 8
"""Of the number that the weights' file begins with: how long its header is."""

MAX_HEADER_BYTES = 2 << 20
"""Of the header, which tells of the tensors behind it."""

_READ_BYTES = 8 << 20
"""Read at once, and taken by the digest at once. Both let go of the GIL, and where many adapters are read at
the same time it is the turns at the GIL that they wait for: the fewer, the better."""

_LOOK_UP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""Opens a folder to look names up in it, which needs no right to list it where there is O_PATH."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Opens a file. O_NONBLOCK: opening a FIFO would wait for its writer."""

_PIECE_BYTES = 4 << 20
"""Read by one call where several threads read."""


class Digest(Protocol):
    """The part of a hashlib object that is used."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class FileState(NamedTuple):
    """What says whether a file is another one than before, or has been changed. Times: ns since the epoch."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class AdapterFile:
    """An open regular file, read once from start to end. All that is read goes into the digest, where there
    is one.

    size: bytes it had when it was opened.
    """

    def __init__(self, name: str, descriptor: int, digest: Digest | None) -> None:
        self.name = name
        self._state = _state_of(descriptor)
        self.size = self._state.size
        self._descriptor = descriptor
        self._digest = digest
        self._position = 0

    def read(self, num_bytes: int) -> bytes:
        """The next num_bytes bytes. Errors: InvalidArgumentError where the file ends before."""
        buffer = bytearray(num_bytes)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes. Errors: InvalidArgumentError where the file ends before."""
        for begin in range(0, len(view), _READ_BYTES):
            piece = view[begin : begin + _READ_BYTES]
            filled = self._fill(piece, self._position)
            if filled < len(piece):
                raise self._ends_early(len(view) - begin - filled)
            self._took(piece)

    def read_in_pieces(self, view: memoryview, threads: LoadThreads) -> None:
        """Fills `view` with the next bytes, on several threads. Errors: as read_into."""
        begins = range(0, len(view), _PIECE_BYTES)
        pieces = [view[begin : begin + _PIECE_BYTES] for begin in begins]
        filled = threads.map(lambda i: self._fill(pieces[i], self._position + begins[i]), range(len(pieces)))
        for begin, piece, count in zip(begins, pieces, filled, strict=True):
            if count < len(piece):
                raise self._ends_early(len(view) - begin - count)
        self._took(view)

    def read_again(self, view: memoryview, position: int) -> None:
        """Fills `view` with the bytes from there on, which were read before. They may be others by now: it is
        for whoever reads the file once more.

        Errors: InvalidArgumentError where the file ends before.
        """
        filled = self._fill(view, position)
        if filled < len(view):
            raise self._ends_early(len(view) - filled)

    def expect_end(self) -> None:
        """Errors: InvalidArgumentError where the file goes on."""
        if os.pread(self._descriptor, 1, self._position):
            raise unservable(f"{self.name} grew while it was read; try again when it is complete")

    def state_if_unchanged(self) -> FileState | None:
        """Its state, where it is the one that the file was opened with; None elsewhere."""
        state = _state_of(self._descriptor)
        return state if state == self._state else None

    def _fill(self, view: memoryview, position: int) -> int:
        """Reads the bytes from there on; answers how many there were, fewer at the end of the file."""
        filled = 0
        while filled < len(view):
            count = os.preadv(self._descriptor, [view[filled:]], position + filled)
            if not count:
                break
            filled += count
        return filled

    def _took(self, view: memoryview) -> None:
        self._position += len(view)
        if self._digest is not None:
            self._digest.update(view)

    def _ends_early(self, num_missing: int) -> InvalidArgumentError:
        return unservable(f"{self.name} ends {num_missing} bytes early; copy it again")


def _state_of(descriptor: int) -> FileState:
    found = os.fstat(descriptor)
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class AdapterFolder:
    """An open folder. Files are looked up in it by name, and through no link but those that it is given."""

    def __init__(self, path: Path, descriptor: int, links: Links = NO_LINKS) -> None:
        self.path = path
        self._descriptor = descriptor
        self._links = links

    @contextmanager
    def open(self, name: str, digest: Digest | None = None) -> Iterator[AdapterFile]:
        """Errors: InvalidArgumentError where it is not there, is not a regular file, or cannot be read."""
        try:
            descriptor = self._open(name)
        except OSError as error:
            raise unservable(self._why_not(name, error)) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise unservable(f"{name} is not a regular file")
            yield AdapterFile(name, descriptor, digest)
        except OSError as error:
            raise unservable(f"{name} cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        if name not in self._links:
            return os.open(name, _READ, dir_fd=self._descriptor)
        path = self._links[name]
        folder = _open_without_links(path.parent)
        try:
            return os.open(path.name, _READ, dir_fd=folder)
        finally:
            os.close(folder)

    def _why_not(self, name: str, error: OSError) -> str:
        if error.errno == errno.ELOOP:
            return (
                f"{name} is a symbolic link, which is only followed from a snapshot in the hub's cache that "
                "--lora-modules names; put the file itself into the folder"
            )
        if error.errno != errno.ENOENT:
            return f"{name} cannot be opened: {error.strerror}"
        if name == WEIGHTS_FILE and self._has(PICKLE_FILE):
            return (
                f"the folder has {PICKLE_FILE} instead of {WEIGHTS_FILE}; a pickle may run code and is not "
                "read: convert it by loading it with PEFT and saving it with save_pretrained"
            )
        return f"{self.path} has no {name}"

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return True


@contextmanager
def open_folder(path: Path, links: Links = NO_LINKS) -> Iterator[AdapterFolder]:
    """path: real, as those of the links are; what has become a link since it was resolved is not followed, at
    any depth.

    Errors: InvalidArgumentError where it is not there or not a folder.
    """
    try:
        descriptor = _open_without_links(path.absolute())
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = error.strerror if isinstance(error, OSError) else error
        raise unservable(f"{str(path)!r} cannot be opened as a folder: {why}") from error
    try:
        yield AdapterFolder(path, descriptor, links)
    finally:
        os.close(descriptor)


def _open_without_links(path: Path) -> int:
    """A descriptor to look files up in, by way of one for each part of the path."""
    descriptor = os.open(path.anchor, _LOOK_UP)
    for part in path.parts[1:]:
        try:
            inner = os.open(part, _LOOK_UP | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor
