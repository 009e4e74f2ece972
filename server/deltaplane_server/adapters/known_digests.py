"""Which files need not be hashed again."""

import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence

from deltaplane_server.adapters.files import FileState

_SETTLED_NS = 2_000_000_000
_MAX_KNOWN = 100_000
_STATE = struct.Struct("=QQqqq")


class KnownDigests:
    """The digests of files that were hashed, by what fstat says of them: device, inode, size, times.

    The system sets the ctime of a file at each change, and no call sets it to a time of one's choice. Files
    whose states are known thus still have the bytes that were hashed, and need not be hashed again. Times are
    coarse, on some file systems up to two seconds: a change right after the hashing could leave a state as it
    is. Hence only states whose ctime was two seconds old when reading began are kept; git calls files with a
    younger time "racily clean", and reads them again as well.

    Nothing is kept over a restart. What is not found this way: what a process writes to a file that it had
    mapped into its memory before, until the system writes the pages back; and other bytes than were written
    from a disk that fails.

    What was found good about such files, that all their values can be served, is kept with their digest.

    The 100,000 adapters that were used last are kept, of about 400 bytes each. Any thread may call.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, str] = OrderedDict()
        self._good: set[bytes] = set()
        self._lock = threading.Lock()

    def get(self, states: Sequence[FileState | None]) -> str | None:
        """The digest of files that were read; None where it must be computed.

        states: of each file; None where it changed while it was read.
        """
        key = _key(states)
        with self._lock:
            if key is None or key not in self._digests:
                return None
            self._digests.move_to_end(key)
            return self._digests[key]

    def are_good(self, states: Sequence[FileState | None]) -> bool:
        """Whether files with these states were put as good ones."""
        with self._lock:
            return _key(states) in self._good

    def put(
        self, states: Sequence[FileState | None], digest: str, read_from: int, *, are_good: bool = False
    ) -> None:
        """Keeps the digest of files that were read, where none was changed since two seconds before.

        states: as in get. read_from: when reading began, in ns since the epoch.
        """
        key = _key(states)
        if key is None or any(state and state.ctime_ns > read_from - _SETTLED_NS for state in states):
            return
        with self._lock:
            self._digests[key] = digest
            self._digests.move_to_end(key)
            if are_good:
                self._good.add(key)
            if len(self._digests) > _MAX_KNOWN:
                oldest, _ = self._digests.popitem(last=False)
                self._good.discard(oldest)


def _key(states: Sequence[FileState | None]) -> bytes | None:
    """The states in a few bytes; None where a file changed while it was read."""
    known = [state for state in states if state is not None]
    return b"".join(_STATE.pack(*state) for state in known) if len(known) == len(states) else None
