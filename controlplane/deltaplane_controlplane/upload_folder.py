"""The server's own folder of uploaded adapters: one folder for each, written aside and renamed into place."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import structlog

from deltaplane_controlplane.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)

_OURS = re.compile(r"\.?upload-[0-9a-f]{32}")
"""A folder of an uploaded adapter; hidden, of one that is still coming."""

_log = structlog.get_logger(__name__)


class UploadFolder:
    """Where uploaded adapters are kept. It has one owner at a time, and anything in it that is not named as
    the folder of an upload is left alone.

    path: real, links resolved.
    """

    def __init__(self, path: Path | None) -> None:
        """path: made where it is not there; None takes a temporary folder, which `close` removes.

        Errors: FailedPreconditionError (it cannot be made, or another server uses it).
        """
        self._is_temporary = path is None
        try:
            if path is None:
                path = Path(tempfile.mkdtemp(prefix="deltaplane-uploads-"))
            path.mkdir(parents=True, exist_ok=True)
            self.path = Path(os.path.realpath(path))
            self._descriptor = _lock(self.path)
        except OSError as error:
            taken = isinstance(error, BlockingIOError)
            why = "another server uses it" if taken else f"it cannot be used: {error.strerror}"
            raise FailedPreconditionError(
                f"upload folder {path}: {why}; give the server one of its own (--upload-dir)",
                reason="UPLOAD_FOLDER_UNUSABLE",
            ) from error
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="upload-remover")

    def sweep(self, sources: Iterable[str]) -> None:
        """Removes what an earlier run left behind: uploads that did not end, and adapters that are not among
        `sources`, the folders that the catalogue names."""
        needed = {Path(source).name for source in sources}
        left = [entry for entry in self.path.iterdir() if entry.name not in needed and self._owns(entry)]
        for entry in left:
            self.discard(entry)
        if left:
            _log.info("uploads.swept", folders=len(left))

    def discard(self, source: str | Path) -> None:
        """Removes the folder of an uploaded adapter, on a thread; any other source is left alone. Returns at
        once."""
        if self._owns(Path(source)):
            with suppress(RuntimeError):  # closed: the next start sweeps it
                self._remover.submit(shutil.rmtree, source, ignore_errors=True)

    def close(self) -> None:
        """Waits for removals; called once, after everything that uses the folder has ended."""
        self._remover.shutdown()
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)

    def _owns(self, folder: Path) -> bool:
        return folder.parent == self.path and _OURS.fullmatch(folder.name) is not None


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file that an upload is to bring. num_bytes: at least 1. sha256: in lower-case hexadecimal.
    field: its path in the request message."""

    field: str
    name: str
    num_bytes: int
    sha256: str


class Upload:
    """The files of one adapter, as they come: hashed and written to a hidden folder, on disk once complete.

    Its methods wait for the disk, and for each other.
    """

    def __init__(self, folder: UploadFolder, files: Sequence[ExpectedFile]) -> None:
        """Touches no disk: the first bytes make the folder."""
        name = f"upload-{uuid.uuid4().hex}"
        self._place = folder.path / name
        self._incoming = folder.path / f".{name}"
        self._expected = iter(files)
        self._current: _IncomingFile | None = None
        self._lock = threading.Lock()
        self._discarded = False

    def write(self, data: bytes) -> None:
        """Takes the next bytes of the files, which follow each other without a gap.

        Errors: InvalidArgumentError (a file has another digest), ResourceExhaustedError (the disk is full),
        InternalError (it cannot be written).
        """
        with self._lock, _disk_errors(self._incoming):
            rest = memoryview(data)
            while rest and not self._discarded:
                if self._current is None:
                    self._incoming.mkdir(mode=0o700, exist_ok=True)
                    self._current = _IncomingFile(self._incoming, next(self._expected))
                rest = self._current.take(rest)
                if self._current.is_complete:
                    self._current.finish()
                    self._current = None

    def commit(self) -> Path:
        """Puts the folder in its place, once all bytes have come. Errors: as those of `write`."""
        with self._lock, _disk_errors(self._place):
            _sync_folder(self._incoming)
            self._incoming.rename(self._place)
            _sync_folder(self._place.parent)
            return self._place

    def discard(self) -> None:
        """Removes all that has come; what comes later is not taken."""
        with self._lock:
            self._discarded = True
            if self._current is not None:
                self._current.close()
            for folder in (self._incoming, self._place):
                shutil.rmtree(folder, ignore_errors=True)


class _IncomingFile:
    """One file, unbuffered."""

    def __init__(self, folder: Path, expected: ExpectedFile) -> None:
        self._expected = expected
        self._missing = expected.num_bytes
        self._digest = hashlib.sha256()
        self._file = FileIO(folder / expected.name, "x")

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


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder for this process. Errors: BlockingIOError where another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sync_folder(folder: Path) -> None:
    """Has the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the upload cannot be written to {path}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceExhaustedError(message, reason="UPLOAD_DISK_FULL", retry_after_s=60.0) from error
        raise InternalError(message, reason="UPLOAD_WRITE_FAILED") from error
