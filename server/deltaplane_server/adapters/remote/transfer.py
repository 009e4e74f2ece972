"""Fetches one file over HTTP: in bounds, resumed where the server allows it, from the start where not.

Resuming follows RFC 9110: Range asks for what is missing, If-Range for all of it where the file has another
ETag by now; what comes must say that it is what was asked for.
"""

import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx2

from deltaplane_controlplane.adapter_store import disk_errors
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.adapters.remote.retries import RETRIED_STATUSES, Retries, TryAgainError

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_ADVANCE_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,18})-\d{1,18}/(?P<total>\d{1,18})")
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e]*"')
_ERROR_CODE = re.compile(r"[A-Za-z]{1,64}")
_XML_ERROR_CODE = re.compile(rb"<Code>([A-Za-z]{1,64})</Code>")
_MAX_ERROR_BODY = 2048


@dataclass(frozen=True, slots=True)
class FileRequest:
    """How a file is asked for. headers: for the host of the URL alone; they may hold credentials."""

    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch.

    shown: its address for people, without credentials. max_bytes: a longer one is refused.
    locate: how to ask for it, made anew for each try, since signatures expire.
    redirect: the URL to go on with when a server sends its client there; None refuses to.
    """

    name: str
    shown: str
    max_bytes: int
    locate: Callable[[], Awaitable[FileRequest]]
    redirect: Callable[[str], str | None]


class Transfer:
    """One file on its way into `sink`, an empty file open for writing.

    received: bytes that have come. total: what the server says there are; None before it has said so.
    """

    def __init__(self, client: httpx2.AsyncClient, file: RemoteFile, sink: FileIO) -> None:
        self.received = 0
        self.total: int | None = None
        self._client = client
        self._file = file
        self._sink = sink
        self._etag = ""
        self._furthest = 0

    async def run(self, retries: Retries) -> None:
        """Fetches all of it; not synced.

        Errors: InvalidArgumentError (too large, not there, not allowed), UnavailableError,
        ResourceExhaustedError and InternalError of the disk.
        """
        await retries.run(self._file.shown, self._attempt)

    async def _attempt(self) -> None:
        asked_from = self.received if self._etag else 0
        extra = {"Accept-Encoding": "identity"}
        if asked_from:
            extra |= {"Range": f"bytes={asked_from}-", "If-Range": self._etag}
        try:
            async with self._respond(await self._file.locate(), extra) as response:
                await self._begin(response, asked_from)
                async for data in response.aiter_raw():
                    self._take(data)
        except httpx2.TransportError as error:
            raise self._try_again(connection_trouble(error)) from error
        except httpx2.InvalidURL as error:
            raise self._unreadable("leads to what is no address") from error
        if self.total not in (None, self.received):
            raise self._try_again(f"the connection ended after {self.received} of {self.total} bytes")

    @asynccontextmanager
    async def _respond(self, request: FileRequest, extra: dict[str, str]) -> AsyncIterator[httpx2.Response]:
        """The answer at the end of redirects."""
        url, headers = request.url, {**request.headers, **extra}
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._client.stream("GET", url, headers=headers) as response:
                if response.status_code not in _REDIRECTS or "location" not in response.headers:
                    yield response
                    return
                target = _join(url, response.headers["location"])
            if not _same_origin(url, target):
                headers = extra
            url = self._follow(target)
        raise self._unreadable(f"sends its client on more than {_MAX_REDIRECTS} times")

    def _follow(self, target: str) -> str:
        url = self._file.redirect(target)
        if url is None:
            raise InvalidArgumentError.for_field(
                "source",
                f"{self._file.shown} leads to {_host(target)!r}, to a place that is not an allowed source",
                reason="SOURCE_NOT_ALLOWED",
            )
        return url

    async def _begin(self, response: httpx2.Response, asked_from: int) -> None:
        """Has the file continue, or begin anew, with the body of an answer."""
        status = response.status_code
        if status == 206 and asked_from:
            self._check_continues(response, asked_from)
            return
        if status == 416 and asked_from:
            raise self._try_from_start("it has no such part any more")
        if status != 200:
            raise await self._refusal(response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._unreadable("is sent compressed, though it was not asked for so")
        self._restart()
        etag = response.headers.get("etag", "")
        self._etag = etag if _STRONG_ETAG.fullmatch(etag) else ""
        length = response.headers.get("content-length", "")
        self.total = int(length) if length.isdecimal() else None
        self._check_size(self.total or 0)

    def _check_continues(self, response: httpx2.Response, asked_from: int) -> None:
        content_range = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        total = None if content_range is None else int(content_range["total"])
        if (
            content_range is None
            or int(content_range["first"]) != asked_from
            or response.headers.get("etag") != self._etag
            or self.total not in (None, total)
        ):
            raise self._try_from_start("it answers with another part than it was asked for")
        self.total = total
        self._check_size(self.total or 0)

    def _take(self, data: bytes) -> None:
        self._check_size(self.received + len(data))
        self.received += len(data)
        with disk_errors(Path(os.fsdecode(self._sink.name))):
            rest = memoryview(data)
            while rest:
                rest = rest[self._sink.write(rest) :]

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._file.max_bytes:
            raise InvalidArgumentError.for_field(
                "source",
                f"{self._file.shown} has {num_bytes} bytes or more; one that can be served here has at most "
                f"{self._file.max_bytes}",
                reason="ADAPTER_TOO_LARGE",
            )

    def _restart(self) -> None:
        self.received, self.total, self._etag = 0, None, ""
        self._sink.seek(0)
        self._sink.truncate()

    def _try_from_start(self, why: str) -> TryAgainError:
        error = self._try_again(why)
        self._restart()
        return error

    def _try_again(self, why: str, after_s: float = 0.0) -> TryAgainError:
        advanced = self.received >= self._furthest + _ADVANCE_BYTES
        if advanced:
            self._furthest = self.received
        return TryAgainError(why, after_s=after_s, advanced=advanced)

    async def _refusal(self, response: httpx2.Response) -> Exception:
        """The error for an answer that is no file."""
        status, code = response.status_code, await _error_code(response)
        answer = f"{status} ({code})" if code else str(status)
        if status in RETRIED_STATUSES:
            return self._try_again(f"it answers {answer}", _retry_after(response))
        if status in (404, 410):
            return self._unreadable(f"does not exist: the server answers {answer}")
        if status in (401, 403):
            return self._unreadable(
                f"is refused with {answer}: check its address, and the credentials of this server for it"
            )
        return self._unreadable(f"cannot be fetched: the server answers {answer}")

    def _unreadable(self, description: str) -> InvalidArgumentError:
        return unreadable(f"{self._file.shown} {description}")


def unreadable(description: str) -> InvalidArgumentError:
    """The error for a source that is not there, or not for us."""
    return InvalidArgumentError.for_field("source", description, reason="SOURCE_NOT_READABLE")


def connection_trouble(error: BaseException) -> str:
    """What went wrong with a connection, for people; holds nothing out of requests."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message}"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError):
        return "there is no connection to it"
    if isinstance(error, httpx2.TimeoutException):
        return "it sends nothing any more"
    return "the connection to it broke"


async def _error_code(response: httpx2.Response) -> str:
    """What the hub, or S3, calls an error; empty where nobody says."""
    code: str = response.headers.get("x-error-code", "")
    if _ERROR_CODE.fullmatch(code):
        return code
    body = b""
    async for data in response.aiter_raw():
        body += data[:_MAX_ERROR_BODY]
        if len(body) >= _MAX_ERROR_BODY:
            break
    found = _XML_ERROR_CODE.search(body)
    return found[1].decode() if found else ""


def _retry_after(response: httpx2.Response) -> float:
    """Seconds, where it is given so."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0


def _join(url: str, location: str) -> str:
    """Errors: InvalidURL."""
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise httpx2.InvalidURL(str(error)) from error


def _same_origin(one: str, other: str) -> bool:
    return urlsplit(one)[:2] == urlsplit(other)[:2]


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2][:200]
