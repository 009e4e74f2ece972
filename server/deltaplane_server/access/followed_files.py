"""Files that are read again when they change, so that keys and tokens are replaced without a restart."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog

from deltaplane_server.startup import StartupError

MAX_FILE_BYTES = 1 << 20

log = structlog.get_logger(__name__)

T = TypeVar("T")


class FlaggedFile(NamedTuple):
    """A file that an option names. Its text is what messages call it."""

    flag: str
    path: Path

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"


class FollowedFiles(Generic[T]):
    """What files say, as they were when they could last be used.

    Files are told apart by their bytes: they are few and small, and a time stamp may stay the same over two
    changes. What cannot be used leaves what is in force as it is, and is told in the log once.
    """

    def __init__(self, files: Sequence[FlaggedFile], parse: Callable[[Sequence[bytes]], T]) -> None:
        """parse: makes the value of the contents of all files, in order; raises StartupError.

        Errors: StartupError, where they cannot be read or used.
        """
        self._files = tuple(files)
        self._parse = parse
        self._contents = self._read()
        self._failure = ""
        self.value = parse(self._contents)

    def refresh(self) -> None:
        """Takes over what has changed. Reads the files: not for an event loop."""
        try:
            contents = self._read()
            if contents != self._contents:
                value = self._parse(contents)
                if self._read() != contents:  # it is being written: the next look sees all of it
                    return
                self._contents, self.value = contents, value
                log.info("access.files_reread", files=[str(file) for file in self._files])
            self._failure = ""
        except StartupError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                log.error("access.files_unusable", reason=self._failure, in_force="what was read before")

    def _read(self) -> tuple[bytes, ...]:
        return tuple(_contents(file) for file in self._files)


def _contents(file: FlaggedFile) -> bytes:
    try:
        # O_NONBLOCK: opening a FIFO would wait for its writer.
        with open(file.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise StartupError(f"{file}: it is not a regular file")
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StartupError(f"{file}: it cannot be read ({error.strerror}); check the path") from None
    if len(data) > MAX_FILE_BYTES:
        raise StartupError(f"{file}: it has over {MAX_FILE_BYTES} bytes; is it the right file?")
    return data
