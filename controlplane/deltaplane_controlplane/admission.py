"""What an adapter must fulfil before it becomes known: its name, its labels, its files, its size."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.errors import (
    DeltaplaneError,
    FailedPreconditionError,
    FieldViolation,
    InvalidArgumentError,
)
from deltaplane_controlplane.ports import (
    NO_PROGRESS,
    AdapterLoader,
    AdapterManifest,
    DevicePool,
    HostAdapter,
    Progress,
    SourceFetcher,
)
from deltaplane_controlplane.sources import AllowedRoots
from deltaplane_controlplane.views import AdapterView

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LABEL_KEY = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_MAX_LABELS = 64
_MAX_LABEL_VALUE = 256

_LOST = frozenset(("ADAPTER_FILES_GONE", "ADAPTER_FILES_CHANGED", "SOURCE_NOT_READABLE"))
"""Reasons for which an adapter's files are fetched again, where they were fetched."""


def check_name(name: str, field: str = "name") -> str:
    """The name, if an adapter may have it. Errors: InvalidArgumentError."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidArgumentError.for_field(
            field, f"{name[:160]!r} is not 1 to 128 characters of [A-Za-z0-9._-], and neither '.' nor '..'"
        )
    return name


def check_labels(labels: Mapping[str, str], field: str = "labels") -> None:
    """Errors: InvalidArgumentError."""
    if len(labels) > _MAX_LABELS:
        raise InvalidArgumentError.for_field(
            field, f"{len(labels)} labels, at most {_MAX_LABELS} are allowed"
        )
    violations = [
        FieldViolation(f"{field}[{key}]", f"a key is 1 to 128 characters of [A-Za-z0-9._/-], not {key!r}")
        for key in labels
        if not _LABEL_KEY.fullmatch(key)
    ]
    violations += [
        FieldViolation(
            f"{field}[{key}]", f"the value has {len(value)} characters, {_MAX_LABEL_VALUE} are allowed"
        )
        for key, value in labels.items()
        if len(value) > _MAX_LABEL_VALUE
    ]
    if violations:
        raise InvalidArgumentError(
            "; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations
        )


class Admission:
    """Checks the files of adapters: where they lie, what is in them, whether they can ever be served here.

    store: where adapters are that were uploaded or fetched.
    fetcher: brings files of remote sources to the store; it comes with one.
    """

    def __init__(
        self,
        loader: AdapterLoader,
        pool: DevicePool,
        roots: AllowedRoots,
        *,
        max_lora_rank: int,
        host_cache_bytes: int,
        store: AdapterStore | None = None,
        fetcher: SourceFetcher | None = None,
    ) -> None:
        self.roots = roots
        self._loader = loader
        self._store = store
        self._fetcher = fetcher
        self._num_pages = pool.num_pages
        self._max_lora_rank = max_lora_rank
        self._host_cache_bytes = host_cache_bytes

    def is_remote(self, source: str) -> bool:
        """Whether a source is to be fetched, which takes its time, instead of a folder."""
        return self._fetcher is not None and self._fetcher.handles(source)

    def check_source(self, source: str, field: str = "source") -> str:
        """A source as it may be shown to others, told before it is read. Paths are checked when they are.

        Errors: InvalidArgumentError (a remote source that is malformed or not allowed).
        """
        if self._fetcher is None or not self._fetcher.handles(source):
            return source
        with _on_field(field):
            return self._fetcher.check(source)

    def is_from(self, manifest: AdapterManifest, source: str) -> bool:
        """Whether files may be those that a remote source names now."""
        return self._fetcher is not None and self._fetcher.is_from(manifest.source, source)

    def inspect(
        self,
        source: str,
        expected_digest: str = "",
        field: str = "source",
        *,
        is_upload: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> AdapterManifest:
        """Checks an adapter's folder, or fetches a remote one and checks that. Reads all of its files, so it
        takes its time. What was fetched is the caller's: `give_back` removes it where nobody takes it.

        is_upload: it is the server's own folder of an upload.
        Errors: InvalidArgumentError; for remote sources as SourceFetcher.fetch.
        """
        if self._fetcher is None or not self._fetcher.handles(source):
            progress.report("check", 0, None)
            return self._inspect_folder(source, expected_digest, field, is_known=is_upload)
        begun = time.monotonic()
        with _on_field(field):
            fetched = self._fetcher.fetch(source, progress)
        fetch_ms = 1e3 * (time.monotonic() - begun)
        folder = str(fetched.folder)
        progress.report("check", 0, None)
        try:
            manifest = self._inspect_folder(folder, expected_digest, field, is_known=True)
        except BaseException:
            self.give_back(folder)
            raise
        return replace(manifest, source=fetched.source, folder=folder, fetch_ms=fetch_ms)

    def give_back(self, folder: str) -> None:
        """Removes an adapter's folder from the store, in the background; leaves any other folder alone."""
        if self._store is not None:
            self._store.discard(folder)

    def settle(
        self, manifest: AdapterManifest, change: Callable[[], AdapterView], *, validate_only: bool = False
    ) -> AdapterView:
        """Makes a change with checked files, and gives back what was fetched where no adapter took it."""
        try:
            view = change()
        except BaseException:
            self.give_back(manifest.path)
            raise
        if validate_only or view.manifest.path != manifest.path:
            self.give_back(manifest.path)
        return view

    def _inspect_folder(
        self, source: str, expected_digest: str, field: str, *, is_known: bool
    ) -> AdapterManifest:
        folder = self.roots.resolve(source, field, is_known=is_known)
        manifest = self._loader.inspect(folder, self.roots.blobs(folder))
        self._check_unmoved(source, folder, field, is_known=is_known)
        if expected_digest and manifest.digest != expected_digest.lower():
            raise InvalidArgumentError.for_field(
                "expected_digest",
                f"the files have SHA-256 {manifest.digest}, not {expected_digest}",
                reason="DIGEST_MISMATCH",
            )
        self._check_size(manifest, field)
        return manifest

    def pack(self, manifest: AdapterManifest) -> HostAdapter:
        """Packs an adapter whose folder must still be allowed and whose files must still be the same.

        Errors: FailedPreconditionError, InvalidArgumentError.
        """
        try:
            folder = self.roots.resolve(manifest.path, is_known=True)
            self._check_size(manifest, "source")
        except DeltaplaneError as error:
            raise FailedPreconditionError(error.message, reason=error.reason) from error
        adapter = self._loader.pack(replace(manifest, source=str(folder)), self.roots.blobs(folder))
        self._check_unmoved(manifest.path, folder, "source", is_known=True)
        return adapter

    def can_recover(self, manifest: AdapterManifest, error: DeltaplaneError) -> bool:
        """Whether these are files that were fetched, and are lost."""
        return (
            error.reason in _LOST
            and self.is_remote(manifest.source)
            and self._store is not None
            and self._store.owns(Path(manifest.path))
        )

    def recover(self, manifest: AdapterManifest, progress: Progress) -> None:
        """Fetches lost files again and puts them where they were.

        Errors: FailedPreconditionError where the source has other files by now; as `inspect`.
        """
        assert self._store is not None
        again = self.inspect(manifest.source, progress=progress)
        try:
            if again.digest != manifest.digest:
                raise FailedPreconditionError(
                    f"the files of {manifest.source} are lost here, and are others there by now (SHA-256 "
                    f"{again.digest}, not {manifest.digest}): update the adapter",
                    reason="ADAPTER_FILES_CHANGED",
                )
            self._store.put_back(Path(again.path), Path(manifest.path))
        except BaseException:
            self.give_back(again.path)
            raise

    def _check_unmoved(self, source: str, folder: Path, field: str, *, is_known: bool) -> None:
        if self.roots.resolve(source, field, is_known=is_known) != folder:
            raise InvalidArgumentError.for_field(field, f"{source!r} was moved while it was read: try again")

    def size_problem(self, manifest: AdapterManifest) -> str:
        """Why an adapter of this size can never be served here; empty where it can."""
        if manifest.rank > self._max_lora_rank:
            return f"rank {manifest.rank} is over --max-lora-rank {self._max_lora_rank}: raise the limit"
        if manifest.num_pages > self._num_pages:
            features = f" with {', '.join(manifest.features)}" if manifest.features else ""
            return (
                f"rank {manifest.rank}{features} takes {manifest.num_pages} rank pages and the device has "
                f"{self._num_pages}: raise --adapter-pages"
            )
        if manifest.host_bytes > self._host_cache_bytes:
            return (
                f"it takes {manifest.host_bytes} bytes of host memory and the host cache has "
                f"{self._host_cache_bytes}: raise --lora-host-memory or --max-cpu-loras"
            )
        return ""

    def _check_size(self, manifest: AdapterManifest, field: str) -> None:
        problem = self.size_problem(manifest)
        if problem:
            raise InvalidArgumentError.for_field(field, problem, reason="ADAPTER_TOO_LARGE")


@contextmanager
def _on_field(field: str) -> Iterator[None]:
    """Has what is wrong with a remote source told of the field that named it."""
    try:
        yield
    except InvalidArgumentError as error:
        description = error.violations[0].description if error.violations else error.message
        raise InvalidArgumentError.for_field(field, description, reason=error.reason) from error
