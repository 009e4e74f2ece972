"""An adapter's files on this machine, as an upload sends them."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from deltaplane.adapter_requests import Tier, tier
from deltaplane.errors import InvalidArgumentError
from deltaplane.v1.adapters_pb2 import UploadAdapterRequest, UploadFile, UploadHeader

UPLOAD_ACCEPTED = "x-deltaplane-upload"
"""Metadata by which a server tells that it has accepted an upload's header and takes its bytes."""

_NAMES = ("adapter_config.json", "adapter_model.safetensors")
_CHUNK_BYTES = 1 << 20


def upload_header(
    name: str,
    folder: str | os.PathLike[str],
    *,
    labels: Mapping[str, str] | None,
    replace: bool,
    etag: str,
    keep_previous: bool,
    load_tier: Tier | None,
    validate_only: bool,
    idempotency_key: str,
) -> UploadHeader:
    """What an upload of the PEFT adapter in `folder` announces. Reads its files, for their digests.

    Errors: InvalidArgumentError (a file cannot be read).
    """
    files = [_described(Path(folder), file) for file in _NAMES]
    return UploadHeader(
        name=name,
        files=files,
        labels=labels,
        replace=replace,
        etag=etag,
        keep_previous=keep_previous,
        load_tier=tier(load_tier),
        validate_only=validate_only,
        idempotency_key=idempotency_key,
    )


def upload_requests(header: UploadHeader, folder: str | os.PathLike[str]) -> Iterator[UploadAdapterRequest]:
    """The messages of an upload. They end early where a file can no longer be read, which the server then
    says."""
    yield UploadAdapterRequest(header=header)
    try:
        for file in header.files:
            with (Path(folder) / file.name).open("rb") as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    yield UploadAdapterRequest(chunk=chunk)
    except OSError:
        return


async def upload_requests_async(
    header: UploadHeader, folder: str | os.PathLike[str]
) -> AsyncIterator[UploadAdapterRequest]:
    """The same for asyncio; the files are read on threads."""
    requests = upload_requests(header, folder)
    while (request := await asyncio.to_thread(next, requests, None)) is not None:
        yield request


def _described(folder: Path, name: str) -> UploadFile:
    path = folder / name
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return UploadFile(name=name, size_bytes=file.tell(), sha256=digest.hexdigest())
    except OSError as error:
        raise InvalidArgumentError.for_field(
            "folder", f"{path} cannot be read ({error.strerror}); give the folder that save_pretrained wrote"
        ) from error
