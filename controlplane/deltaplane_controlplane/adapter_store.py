"""The server's own folder of adapters that came to it, each written aside and renamed into place."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import structlog

from deltaplane_controlplane.errors import FailedPreconditionError, InternalError, ResourceExhaustedError

_OURS = re.compile(r"\.?(upload|fetch)-[0-9a-f]{32}")
"""The folder of an adapter; hidden, of one that is still coming."""

_log = structlog.get_logger(__name__)


class AdapterStore:
    """Where adapters that were uploaded or fetched are kept. It has one owner at a time, and anything in it
    that is not named as the folder of such an adapter is left alone. A folder belongs to one version.

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
                reason="ADAPTER_STORE_UNUSABLE",
            ) from error
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="adapter-remover")

    def sweep(self, sources: Iterable[str]) -> None:
        """Removes what an earlier run left behind: adapters that did not come to their end, and those that
        are not among `sources`, the folders that the catalogue names."""
        needed = {Path(source).name for source in sources}
        left = [entry for entry in self.path.iterdir() if entry.name not in needed and self.owns(entry)]
        for entry in left:
            self.discard(entry)
        if left:
            _log.info("adapter_store.swept", folders=len(left))

    def owns(self, folder: Path) -> bool:
        """Whether this is the path of an adapter's folder in the store; it need not be there."""
        return folder.parent == self.path and _OURS.fullmatch(folder.name) is not None

    def put_back(self, folder: Path, place: Path) -> None:
        """Moves an adapter's folder to where files of the same adapter were lost. Both are the store's.

        Errors: ResourceExhaustedError, InternalError.
        """
        assert self.owns(folder)
        assert self.owns(place)
        with disk_errors(place):
            shutil.rmtree(place, ignore_errors=True)
            folder.rename(place)
            _sync_folder(self.path)

    def discard(self, source: str | Path) -> None:
        """Removes the folder of an adapter, on a thread; any other source is left alone. Returns at once."""
        if self.owns(Path(source)):
            with suppress(RuntimeError):  # closed: the next start sweeps it
                self._remover.submit(shutil.rmtree, source, ignore_errors=True)

    def close(self) -> None:
        """Waits for removals; called once, after everything that uses the folder has ended."""
        self._remover.shutdown()
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


class IncomingFolder:
    """The folder of one adapter while its files come: hidden until it is put in its place, with all of it on
    disk. Its methods wait for the disk; they are called by one thread at a time.

    path: hidden. Nothing is there before the first file is made.
    """

    def __init__(self, store: AdapterStore, kind: str) -> None:
        """kind: "upload" or "fetch"."""
        self._store, self._kind = store, kind
        name = f"{kind}-{uuid.uuid4().hex}"
        self._place = store.path / name
        self.path = store.path / f".{name}"

    def create(self, name: str) -> FileIO:
        """A new file of the folder, unbuffered. Errors: those of `disk_errors`."""
        with disk_errors(self.path):
            self.path.mkdir(mode=0o700, exist_ok=True)
            return FileIO(self.path / name, "x+")

    def copy(self) -> "IncomingFolder":
        """Another folder with the same files, which share their bytes on disk. Errors: as `create`."""
        other = IncomingFolder(self._store, self._kind)
        try:
            with disk_errors(other.path):
                other.path.mkdir(mode=0o700)
                for file in self.path.iterdir():
                    os.link(file, other.path / file.name)
        except BaseException:
            other.discard()
            raise
        return other

    def commit(self) -> Path:
        """Puts the folder in its place; its files are synced already. Errors: those of `disk_errors`."""
        with disk_errors(self._place):
            _sync_folder(self.path)
            self.path.rename(self._place)
            _sync_folder(self._place.parent)
            return self._place

    def discard(self) -> None:
        """Removes all that has come, put in its place or not."""
        for folder in (self.path, self._place):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors: ResourceExhaustedError where the disk is full, InternalError where it cannot be written."""
    try:
        yield
    except OSError as error:
        message = f"the adapter cannot be written to {path}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceExhaustedError(message, reason="ADAPTER_STORE_FULL", retry_after_s=60.0) from error
        raise InternalError(message, reason="ADAPTER_STORE_WRITE_FAILED") from error


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
