"""A web server in this process that serves files as good servers do, and fails as bad ones do, for tests."""

import hashlib
import re
import select
import ssl
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from certificates import Pair

_RANGE = re.compile(r"bytes=(\d+)-")


@dataclass(frozen=True)
class Asked:
    """A request as it came. path: with its query."""

    path: str
    headers: Mapping[str, str]

    @property
    def offset(self) -> int | None:
        """Where the part begins that was asked for."""
        match = _RANGE.fullmatch(self.headers.get("range", ""))
        return int(match[1]) if match else None


Fault = Callable[["HttpHost", BaseHTTPRequestHandler, bytes], None]
"""Answers one request in place of the server. The last argument is the file that was asked for."""


@dataclass
class HttpHost:
    """Made by http_host().

    files: by path, without a query. faults: of the next requests for a path, in order; None answers well.
    check: asked before all else; a fault that it answers is used.
    stalled: set when a stall begins. left: set when a client leaves in one. released: ends them.
    """

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, deque[Fault | None]] = field(default_factory=lambda: defaultdict(deque))
    check: Callable[[Asked], Fault | None] = lambda asked: None
    has_etags: bool = True
    has_ranges: bool = True
    asked: list[Asked] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    def offsets(self, path: str) -> list[int | None]:
        """Where the parts began that were asked of a file, in order; None is all of it."""
        return [asked.offset for asked in self.asked if asked.path == path]

    def fail(self, path: str, *faults: Fault | None) -> None:
        self.faults[path].extend(faults)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = Asked(handler.path, {k.lower(): v for k, v in handler.headers.items()})
        self.asked.append(asked)
        path = handler.path.partition("?")[0]
        waiting = self.faults[path]
        fault = self.check(asked) or (waiting.popleft() if waiting else None)
        if fault is not None:
            fault(self, handler, self.files.get(path, b""))
        elif path not in self.files:
            status(404)(self, handler, b"")
        else:
            self._serve(handler, asked, self.files[path])

    def _serve(self, handler: BaseHTTPRequestHandler, asked: Asked, content: bytes) -> None:
        begin = asked.offset if self.has_ranges else None
        if begin is not None and asked.headers.get("if-range") not in (None, etag(content)):
            begin = None
        send(handler, 200 if begin is None else 206, content, begin or 0, with_etag=self.has_etags)


def etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


def send(
    handler: BaseHTTPRequestHandler,
    code: int,
    content: bytes,
    begin: int = 0,
    *,
    num_bytes: int | None = None,
    with_etag: bool = True,
) -> None:
    """Sends a file from `begin` on, or just `num_bytes` of what the headers promise."""
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(content) - begin))
    if with_etag:
        handler.send_header("ETag", etag(content))
    if code == 206:
        handler.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
    handler.end_headers()
    handler.wfile.write(content[begin:] if num_bytes is None else content[begin : begin + num_bytes])
    handler.wfile.flush()


def status(code: int, body: bytes = b"", **headers: str) -> Fault:
    """Answers a status. headers: names with _ for -."""

    def answer(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirect(location: str, code: int = 302) -> Fault:
    return status(code, Location=location)


def cut(num_bytes: int) -> Fault:
    """Promises all that was asked for, sends some of it and closes the connection."""

    def answer(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        begin = Asked(handler.path, {k.lower(): v for k, v in handler.headers.items()}).offset or 0
        code = 206 if begin and host.has_ranges else 200
        begin = begin if code == 206 else 0
        send(handler, code, content, begin, num_bytes=num_bytes, with_etag=host.has_etags)
        handler.close_connection = True

    return answer


def stall(num_bytes: int) -> Fault:
    """Sends some of it, and then nothing until the client leaves or the host is released."""

    def answer(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        send(handler, 200, content, num_bytes=num_bytes, with_etag=host.has_etags)
        host.stalled.set()
        handler.close_connection = True
        while not host.released.is_set():
            if select.select([handler.connection], [], [], 0.01)[0]:
                host.left.set()
                return

    return answer


def drip(num_bytes: int) -> Fault:
    """Sends some of it, and then a byte now and then until the client leaves or all is sent."""

    def answer(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        send(handler, 200, content, num_bytes=num_bytes, with_etag=host.has_etags)
        host.stalled.set()
        handler.close_connection = True
        for position in range(num_bytes, len(content)):
            if host.released.wait(0.01) or select.select([handler.connection], [], [], 0)[0]:
                host.left.set()
                return
            handler.wfile.write(content[position : position + 1])

    return answer


def wrong_part(shift: int) -> Fault:
    """Answers a request for a part with one that begins elsewhere."""

    def answer(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        begin = Asked(handler.path, {k.lower(): v for k, v in handler.headers.items()}).offset or 0
        send(handler, 206, content, min(max(begin + shift, 0), len(content)))

    return answer


def window(num_bytes: int) -> Fault:
    """Answers a request for a part with this much of it and no more, which a server may do."""

    def answer(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        begin = Asked(handler.path, {k.lower(): v for k, v in handler.headers.items()}).offset or 0
        end = begin + num_bytes
        handler.send_response(206)
        handler.send_header("Content-Length", str(num_bytes))
        handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        handler.send_header("ETag", etag(content))
        handler.end_headers()
        handler.wfile.write(content[begin:end])

    return answer


def endless(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
    """Promises nothing and sends until nobody listens."""
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    try:
        while not host.released.is_set():
            handler.wfile.write(bytes(1 << 16))
    except OSError:
        pass


def without_length(host: HttpHost, handler: BaseHTTPRequestHandler, content: bytes) -> None:
    """Sends all of it and closes the connection, as servers of old did."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(content)
    handler.close_connection = True


@contextmanager
def http_host(files: Mapping[str, bytes] | None = None, tls: Pair | None = None) -> Iterator[HttpHost]:
    """files: by path. tls: its certificate, for https://."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            host.answer(self)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that went away is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    scheme = "http" if tls is None else "https"
    host = HttpHost(f"{scheme}://127.0.0.1:{server.server_port}", dict(files or {}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield host
    finally:
        host.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
