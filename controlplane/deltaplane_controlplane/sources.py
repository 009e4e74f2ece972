"""Which folders adapters may come from."""

import os
import threading
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.ports import NO_LINKS, Links

MAX_SOURCE_LENGTH = 4096
MAX_ENTRIES = 4096
"""Of an adapter's folder."""


class AllowedRoots:
    """Folders under which, links resolved, an adapter's folder and every file in it must lie.

    A path is checked when it is registered, again after it was inspected, and again before each load, so
    that a link that is changed in between is found; what is read must also have the registered digest.

    store: the server's own folder of uploaded and fetched adapters, links resolved. No root opens it: what
    is in it belongs to the adapter that it came for, and goes with it.
    """

    def __init__(self, roots: Iterable[Path] = (), store: Path | None = None) -> None:
        self._roots = tuple(dict.fromkeys(_real(root) for root in roots))
        self._links: Mapping[Path, Links] = {}
        self._store = store
        self._lock = threading.Lock()

    def trust(self, folder: Path) -> None:
        """Allows an adapter's folder, and the links in it as they lead now.

        For adapters that the one who starts the server names.
        """
        real = _real(folder)
        entries = real.iterdir() if real.is_dir() else ()
        links = {entry.name: _real(entry) for entry in entries if entry.is_symlink()}
        with self._lock:
            self._roots = tuple(dict.fromkeys((*self._roots, real)))
            self._links = {**self._links, real: links}

    def blobs(self, folder: Path) -> Links:
        """The links of a trusted folder that its files may be read through: those of a snapshot in the cache
        of the Hugging Face hub, which lead to what the cache keeps beside it, of this repository or of all,

            <cache>/<repository>/snapshots/<commit>/<file> -> <cache>/<repository>/blobs/<digest>
                                                              <cache>/blobs/<2 digits>/<digest>

        folder: as `resolve` answers it.
        """
        repository = folder.parent.parent
        if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
            return NO_LINKS
        stores = (repository / "blobs", repository.parent / "blobs")
        links = self._links.get(folder, NO_LINKS)
        return {name: path for name, path in links.items() if any(map(path.is_relative_to, stores))}

    def resolve(self, source: str, field: str = "source", *, is_known: bool = False) -> Path:
        """The real path of an adapter's folder.

        is_known: the server itself names it, for an adapter that came to it or is registered: it may
            be in the store.
        Errors: InvalidArgumentError (on `field`), which names the allowed roots. It does not tell what
        there is outside of them.
        """
        if len(source) > MAX_SOURCE_LENGTH:
            raise _refused(field, f"{len(source)} characters; a path has at most {MAX_SOURCE_LENGTH}")
        if not os.path.isabs(source) or "\0" in source:
            raise _refused(field, f"{source!r} is not an absolute path; adapters come from {self}")
        self._check_inside(_real(Path(source)), source, field, is_known)
        try:
            # Strictly: where links form a loop, realpath leaves the rest of the path as it is.
            folder = Path(os.path.realpath(source, strict=True))
            self._check_inside(folder, source, field, is_known)
            links = _links_in(folder)
        except FileNotFoundError:
            raise _unreadable(field, f"there is no folder {source!r}") from None
        except NotADirectoryError:
            raise _unreadable(field, f"{source!r} is not a folder; name the folder of the adapter") from None
        except OSError as error:
            raise _unreadable(field, f"{source!r} cannot be read: {error.strerror}") from None
        if links is None:
            raise _unreadable(field, f"{source!r} has over {MAX_ENTRIES} entries; an adapter has a few")
        trusted = self._links.get(folder, NO_LINKS)
        for name in links:
            path = _real(folder / name)
            if path != trusted.get(name):
                self._check_inside(path, f"{source}/{name}", field, is_known)
        return folder

    def __str__(self) -> str:
        return ", ".join(map(str, self._roots)) or "no folder: start the server with --adapter-roots"

    def _check_inside(self, path: Path, shown: str, field: str, is_known: bool) -> None:
        if self._store is not None and path.is_relative_to(self._store):
            if not is_known:
                raise _refused(field, f"{shown!r} belongs to the adapter that it came for")
        elif not any(path.is_relative_to(root) for root in self._roots):
            raise _refused(
                field,
                f"{shown!r} lies outside of the allowed roots, links resolved: adapters come from {self}",
            )


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _links_in(folder: Path) -> list[str] | None:
    """The names of the links in a folder; None where it has too many entries."""
    with os.scandir(folder) as scan:
        entries = list(islice(scan, MAX_ENTRIES + 1))
    return None if len(entries) > MAX_ENTRIES else [entry.name for entry in entries if entry.is_symlink()]


def _refused(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.for_field(field, description, reason="SOURCE_NOT_ALLOWED")


def _unreadable(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.for_field(field, description, reason="SOURCE_NOT_READABLE")
