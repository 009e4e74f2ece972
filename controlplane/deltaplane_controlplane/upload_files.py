"""The files of an upload, as they come."""

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from deltaplane_controlplane.adapter_store import AdapterStore, IncomingFolder, disk_errors
from deltaplane_controlplane.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file that an upload is to bring. num_bytes: at least 1. sha256: in lower-case hexadecimal.
    field: its path in the request message."""

    field: str
    name: str
    num_bytes: int
    sha256: str


class Upload:
    """The files of one adapter, as they come: hashed and written aside, on disk once complete.

    Its methods wait for the disk, and for each other.
    """

    def __init__(self, store: AdapterStore, files: Sequence[ExpectedFile]) -> None:
        """Touches no disk: the first bytes make the folder."""
        self._folder = IncomingFolder(store, "upload")
        self._expected = iter(files)
        self._current: _IncomingFile | None = None
        self._lock = threading.Lock()
        self._discarded = False

    def write(self, data: bytes) -> None:
        """Takes the next bytes of the files, which follow each other without a gap.

        Errors: InvalidArgumentError (a file has another digest), ResourceExhaustedError (the disk is full),
        InternalError (it cannot be written).
        """
        with self._lock, disk_errors(self._folder.path):
            rest = memoryview(data)
            while rest and not self._discarded:
                if self._current is None:
                    expected = next(self._expected)
                    self._current = _IncomingFile(self._folder.create(expected.name), expected)
                rest = self._current.take(rest)
                if self._current.is_complete:
                    self._current.finish()
                    self._current = None

    def commit(self) -> Path:
        """Puts the folder in its place, once all bytes have come. Errors: as those of `write`."""
        with self._lock:
            return self._folder.commit()

    def discard(self) -> None:
        """Removes all that has come; what comes later is not taken."""
        with self._lock:
            self._discarded = True
            if self._current is not None:
                self._current.close()
            self._folder.discard()


class _IncomingFile:
    """One file, unbuffered."""

    def __init__(self, file: FileIO, expected: ExpectedFile) -> None:
        self._file = file
        self._expected = expected
        self._missing = expected.num_bytes
        self._digest = hashlib.sha256()

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def take(self, data: memoryview) -> memoryview:
        """Writes what is this file's; answers the rest."""
        own, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(own)
        self._digest.update(own)
        while own:
            own = own[os.write(self._file.fileno(), own) :]
        return rest

    def finish(self) -> None:
        """Errors: InvalidArgumentError."""
        found, expected = self._digest.hexdigest(), self._expected
        if found != expected.sha256:
            raise InvalidArgumentError.for_field(
                f"{expected.field}.sha256",
                f"the bytes of {expected.name} have SHA-256 {found}, not {expected.sha256}: send them again",
                reason="DIGEST_MISMATCH",
            )
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        self._file.close()
