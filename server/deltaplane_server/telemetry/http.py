"""The HTTP port: /metrics for Prometheus, /healthz and /readyz for orchestrators."""

import socket
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_STOP_CHECK_S = 0.05
"""How often the listening thread looks whether it is to stop."""

Check = Callable[[], str | None]
"""None when all is well, else what is not."""


class HttpServer:
    """Answers in threads of its own, so that a busy event loop cannot make a healthy process look dead."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, *, alive: Check, ready: Check
    ) -> None:
        """Listens at once. Errors: OSError, where host:port cannot be listened on."""
        routes = {
            "/metrics": lambda accept: _metrics(registry, accept),
            "/healthz": lambda _: _check(alive),
            "/readyz": lambda _: _check(ready),
        }
        self._server = _server_class(host)((host.strip("[]"), port), _handler_class(routes))
        self._thread = Thread(
            target=self._server.serve_forever, args=(_STOP_CHECK_S,), name="http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""


def _metrics(registry: CollectorRegistry, accept: str) -> Answer:
    encode, content_type = choose_encoder(accept)
    return HTTPStatus.OK, content_type, encode(registry)


def _check(check: Check) -> Answer:
    problem = check()
    status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
    return status, "text/plain; charset=utf-8", f"{problem or 'ok'}\n".encode()


def _server_class(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    return Server


def _handler_class(routes: dict[str, Callable[[str], Answer]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "deltaplane"
        sys_version = ""
        timeout = 10

        def do_GET(self) -> None:
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                self._send(
                    (HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"see /metrics, /healthz, /readyz\n")
                )
            else:
                self._send(route(self.headers.get("Accept", "")))

        do_HEAD = do_GET  # noqa: N815

        def _send(self, answer: Answer) -> None:
            status, content_type, body = answer
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Probes and scrapes come every few seconds: not worth a line."""

    return Handler
