"""UploadAdapter: a client's stream of a header and chunks, until it is an adapter or an error.

What the header says is checked before a byte is taken; what comes after it must fit the header exactly. The
event loop only counts: files are written, hashed and checked on threads.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from deltaplane.v1 import adapters_pb2 as pb
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.admission import check_labels, check_name
from deltaplane_controlplane.conversion import tier_argument
from deltaplane_controlplane.errors import (
    DeadlineExceededError,
    FieldViolation,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from deltaplane_controlplane.manager import AdapterManager
from deltaplane_controlplane.upload_files import ExpectedFile, Upload
from deltaplane_controlplane.upload_terms import UploadTerms
from deltaplane_controlplane.views import AdapterView

ACCEPTED = ("x-deltaplane-upload", "accepted")
"""Metadata that goes out when the header is accepted: a client that waits for it sends no bytes in vain."""

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_SHOWN_NAMES = 3
_BUSY_RETRY_S = 5.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Bounds of uploads.

    max_config_bytes, max_weights_bytes: of each file.
    max_at_once: uploads whose bytes are being taken.
    stall_timeout_s: how long a client may send nothing.
    """

    max_config_bytes: int
    max_weights_bytes: int
    max_at_once: int = 4
    stall_timeout_s: float = 60.0


class Uploads:
    """Takes uploads into a folder and has the manager register them. Used by one event loop.

    An upload that ends before all of its bytes have come leaves nothing behind. After that, a caller who goes
    away does not stop it, as with any change.
    """

    def __init__(self, manager: AdapterManager, store: AdapterStore, limits: UploadLimits) -> None:
        self._manager = manager
        self._store = store
        self._limits = limits
        self._under_way = 0
        self._threads = ThreadPoolExecutor(limits.max_at_once, thread_name_prefix="adapter-upload")

    async def receive(
        self, requests: AsyncIterable[pb.UploadAdapterRequest], accept: Callable[[], Awaitable[None]]
    ) -> AdapterView:
        """Takes one upload to its end.

        accept: tells the client that its header is good (ACCEPTED).
        Errors: InvalidArgumentError (order, sizes, digests, files), AlreadyExistsError, NotFoundError (there
        is nothing to replace), ResourceExhaustedError (too large, too many at once, no disk),
        DeadlineExceededError (the client stalled).
        """
        messages = _Messages(requests, self._limits.stall_timeout_s)
        header = await messages.header()
        files = check_header(header, self._limits)
        terms = _terms(header, files)
        earlier = self._manager.check_upload(terms)
        if earlier is not None:
            return earlier
        with self._turn():
            await accept()
            upload = Upload(self._store, files)
            try:
                async with aclosing(messages.chunks(sum(file.num_bytes for file in files))) as chunks:
                    async for chunk in chunks:
                        await self._on_thread(partial(upload.write, chunk))
            except BaseException:
                self._discard(upload)
                raise
            return await asyncio.shield(self._on_thread(partial(self._register, upload, terms)))

    def close(self) -> None:
        """Waits for what is under way; called after the gRPC server has stopped."""
        self._threads.shutdown()

    def _register(self, upload: Upload, terms: UploadTerms) -> AdapterView:
        """Runs to its end, whoever waits for it."""
        try:
            folder = str(upload.commit())
            view = self._manager.register_upload(folder, terms)
        except BaseException:
            upload.discard()
            raise
        if terms.validate_only or view.manifest.path != folder:  # or it has the same files elsewhere
            upload.discard()
        return view

    def _discard(self, upload: Upload) -> None:
        try:
            self._threads.submit(upload.discard)
        except RuntimeError:  # closed: the server has stopped, and has nothing to wait for
            upload.discard()

    def _on_thread(self, call: Callable[[], _T]) -> "asyncio.Future[_T]":
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        limit = self._limits.max_at_once
        if self._under_way >= limit:
            raise ResourceExhaustedError(
                f"{self._under_way} uploads are under way, at most {limit} are taken at once: try later",
                reason="TOO_MANY_UPLOADS",
                retry_after_s=_BUSY_RETRY_S,
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


class _Messages:
    """The messages of one upload, in the order that they must have, each within the stall timeout.

    Errors: InvalidArgumentError, DeadlineExceededError.
    """

    def __init__(self, requests: AsyncIterable[pb.UploadAdapterRequest], stall_timeout_s: float) -> None:
        self._requests = aiter(requests)
        self._stall_timeout_s = stall_timeout_s

    async def header(self) -> pb.UploadHeader:
        message = await self._next()
        if message is None:
            raise InvalidArgumentError.for_field("header", "the stream ended before its first message")
        if message.WhichOneof("part") != "header":
            raise InvalidArgumentError.for_field(
                "header", f"the first message is the header, not a chunk of {len(message.chunk)} bytes"
            )
        return message.header

    async def chunks(self, num_bytes: int) -> AsyncGenerator[bytes, None]:
        """The rest, which is `num_bytes` bytes in all."""
        received = 0
        while (message := await self._next()) is not None:
            if message.WhichOneof("part") == "header":
                raise InvalidArgumentError.for_field("header", "it came twice; a call uploads one adapter")
            if not message.chunk:
                missing = num_bytes - received
                raise InvalidArgumentError.for_field("chunk", f"0 bytes came where {missing} are missing")
            received += len(message.chunk)
            if received > num_bytes:
                raise InvalidArgumentError.for_field(
                    "chunk", f"{received} bytes came, the header announced {num_bytes}"
                )
            yield message.chunk
        if received < num_bytes:
            raise InvalidArgumentError.for_field(
                "chunk", f"the stream ended after {received} bytes, the header announced {num_bytes}"
            )

    async def _next(self) -> pb.UploadAdapterRequest | None:
        """None at the end."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                return await anext(self._requests, None)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the client sent nothing for {self._stall_timeout_s:g} s: upload it again",
                reason="UPLOAD_STALLED",
            ) from None


def _terms(header: pb.UploadHeader, files: Sequence[ExpectedFile]) -> UploadTerms:
    """Errors: InvalidArgumentError (the tier)."""
    return UploadTerms(
        name=header.name,
        digests={file.name: file.sha256 for file in files},
        labels=dict(header.labels),
        replace=header.replace,
        etag=header.etag,
        keep_previous=header.keep_previous,
        load_tier=tier_argument(header.load_tier, "header.load_tier"),
        validate_only=header.validate_only,
        idempotency_key=header.idempotency_key,
    )


def check_header(header: pb.UploadHeader, limits: UploadLimits) -> tuple[ExpectedFile, ...]:
    """The files that a header announces, in order.

    Errors: InvalidArgumentError (with all fields of the files that are wrong), ResourceExhaustedError (a file
    is larger than any that could be served).
    """
    check_name(header.name, "header.name")
    check_labels(header.labels, "header.labels")
    _check_names([file.name for file in header.files])
    violations = []
    for number, file in enumerate(header.files):
        if not file.size_bytes:
            violations.append(FieldViolation(f"header.files[{number}].size_bytes", "0 bytes are no file"))
        if not _SHA256.fullmatch(file.sha256):
            description = f"{file.sha256[:80]!r} is not 64 hexadecimal digits"
            violations.append(FieldViolation(f"header.files[{number}].sha256", description))
    if violations:
        raise InvalidArgumentError(
            "; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations
        )
    _check_sizes(header.files, limits)
    return tuple(
        ExpectedFile(f"header.files[{number}]", file.name, file.size_bytes, file.sha256.lower())
        for number, file in enumerate(header.files)
    )


def _check_names(names: Sequence[str]) -> None:
    if sorted(names) != [CONFIG_FILE, WEIGHTS_FILE]:
        shown = ", ".join(repr(name[:64]) for name in names[:_SHOWN_NAMES]) or "none"
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise InvalidArgumentError.for_field(
            "header.files", f"an upload brings {CONFIG_FILE} and {WEIGHTS_FILE}, each once; not {shown}{more}"
        )


def _check_sizes(files: Sequence[pb.UploadFile], limits: UploadLimits) -> None:
    allowed = {CONFIG_FILE: limits.max_config_bytes, WEIGHTS_FILE: limits.max_weights_bytes}
    for number, file in enumerate(files):
        if file.size_bytes > allowed[file.name]:
            raise ResourceExhaustedError(
                f"header.files[{number}].size_bytes: {file.name} has {file.size_bytes} bytes; one that can "
                f"be served here has at most {allowed[file.name]}",
                reason="UPLOAD_TOO_LARGE",
            )
