"""What an adapter must fulfil before it becomes known: its name, its labels, its files, its size."""

import re
from collections.abc import Mapping
from pathlib import Path

from deltaplane_controlplane.errors import (
    DeltaplaneError,
    FailedPreconditionError,
    FieldViolation,
    InvalidArgumentError,
)
from deltaplane_controlplane.ports import AdapterLoader, AdapterManifest, DevicePool, HostAdapter, rank_pages
from deltaplane_controlplane.sources import AllowedRoots

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LABEL_KEY = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_MAX_LABELS = 64
_MAX_LABEL_VALUE = 256


def check_name(name: str, field: str = "name") -> str:
    """The name, if an adapter may have it. Errors: InvalidArgumentError."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidArgumentError.for_field(
            field, f"{name!r} is not 1 to 128 characters of [A-Za-z0-9._-], and neither '.' nor '..'"
        )
    return name


def check_labels(labels: Mapping[str, str], field: str = "labels") -> None:
    """Errors: InvalidArgumentError."""
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
    if len(labels) > _MAX_LABELS:
        violations.append(FieldViolation(field, f"{len(labels)} labels, at most {_MAX_LABELS} are allowed"))
    if violations:
        raise InvalidArgumentError(
            "; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations
        )


class Admission:
    """Checks the files of adapters: where they lie, what is in them, whether they can ever be served here."""

    def __init__(
        self,
        loader: AdapterLoader,
        pool: DevicePool,
        roots: AllowedRoots,
        *,
        max_lora_rank: int,
        host_cache_bytes: int,
    ) -> None:
        self.roots = roots
        self._loader = loader
        self._num_pages = pool.num_pages
        self._max_lora_rank = max_lora_rank
        self._host_cache_bytes = host_cache_bytes

    def inspect(
        self, source: str, expected_digest: str = "", field: str = "source", *, is_upload: bool = False
    ) -> AdapterManifest:
        """Checks an adapter's folder. Reads all of its files, so it takes its time.

        is_upload: it is the server's own folder of an upload.
        Errors: InvalidArgumentError.
        """
        folder = self.roots.resolve(source, field, is_known=is_upload)
        manifest = self._loader.inspect(folder)
        self._check_unmoved(source, folder, field, is_known=is_upload)
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
            folder = self.roots.resolve(manifest.source, is_known=True)
            self._check_size(manifest, "source")
        except DeltaplaneError as error:
            raise FailedPreconditionError(error.message, reason=error.reason) from error
        adapter = self._loader.pack(manifest)
        self._check_unmoved(manifest.source, folder, "source", is_known=True)
        return adapter

    def _check_unmoved(self, source: str, folder: Path, field: str, *, is_known: bool) -> None:
        if self.roots.resolve(source, field, is_known=is_known) != folder:
            raise InvalidArgumentError.for_field(field, f"{source!r} was moved while it was read: try again")

    def size_problem(self, manifest: AdapterManifest) -> str:
        """Why an adapter of this size can never be served here; empty where it can."""
        pages = rank_pages(manifest.rank)
        if manifest.rank > self._max_lora_rank:
            return f"rank {manifest.rank} is over --max-lora-rank {self._max_lora_rank}: raise the limit"
        if pages > self._num_pages:
            return (
                f"rank {manifest.rank} takes {pages} rank pages and the device has {self._num_pages}: "
                "give it more adapter pages"
            )
        if manifest.host_bytes > self._host_cache_bytes:
            return (
                f"it takes {manifest.host_bytes} bytes of host memory and the host cache has "
                f"{self._host_cache_bytes}: give it more"
            )
        return ""

    def _check_size(self, manifest: AdapterManifest, field: str) -> None:
        problem = self.size_problem(manifest)
        if problem:
            raise InvalidArgumentError.for_field(field, problem, reason="ADAPTER_TOO_LARGE")
