"""Reads an adapter's files: regular ones inside its folder, in bounds, each byte once and into its digest."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from deltaplane_server.adapters.unservable import unservable

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"


class Digest(Protocol):
    """The part of a hashlib object that takes bytes."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class AdapterFile:
    """An open regular file, read once from start to end. All that is read goes into the digest.

    size: bytes it had when it was opened.
    """

    def __init__(self, name: str, descriptor: int, digest: Digest) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._digest = digest

    def read(self, num_bytes: int) -> bytes:
        """The next num_bytes bytes. Errors: InvalidArgumentError where the file ends before."""
        buffer = bytearray(num_bytes)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes. Errors: InvalidArgumentError where the file ends before."""
        filled = 0
        while filled < len(view):
            count = os.readv(self._descriptor, [view[filled:]])
            if not count:
                raise unservable(f"{self.name} ends {len(view) - filled} bytes early; copy it again")
            filled += count
        self._digest.update(view)

    def expect_end(self) -> None:
        """Errors: InvalidArgumentError where the file goes on."""
        if os.read(self._descriptor, 1):
            raise unservable(f"{self.name} grew while it was read; try again when it is complete")


class AdapterFolder:
    """An open folder. Files are looked up in it by name, and not through links."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @contextmanager
    def open(self, name: str, digest: Digest) -> Iterator[AdapterFile]:
        """Errors: InvalidArgumentError where it is not there, is not a regular file, or cannot be read."""
        # O_NONBLOCK: opening a FIFO would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
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

    def _why_not(self, name: str, error: OSError) -> str:
        if error.errno == errno.ELOOP:
            return f"{name} is a symbolic link; put the file itself into the folder"
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
def open_folder(path: Path) -> Iterator[AdapterFolder]:
    """Errors: InvalidArgumentError where it is not there or not a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = error.strerror if isinstance(error, OSError) else error
        raise unservable(f"{str(path)!r} cannot be opened as a folder: {why}") from error
    try:
        yield AdapterFolder(path, descriptor)
    finally:
        os.close(descriptor)
