"""A gRPC server of one plane: its port, its health, its reflection."""

from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deltaplane_controlplane.interceptor import ErrorInterceptor
from deltaplane_server.access.plane_access import PlaneAccess
from deltaplane_server.network import addresses, join_host_port
from deltaplane_server.startup import StartupError, one_line
from deltaplane_server.telemetry.grpc_metrics import GrpcServerMetrics

MAX_MESSAGE_BYTES = 16 << 20
"""Of a request. A prompt of a long-context model takes a few; gRPC's own limit of 4 MiB is close to that."""

_OPTIONS: list[tuple[str, int]] = [
    # Else a second server takes the same port, and half of the connections, without a word.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A long prefill is a silent stream: let clients ping through it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Finds out that a client's machine is gone, and with it who holds the pages of its requests.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class Plane:
    """One grpc.aio server. Errors of handlers are answered by the one table, calls are counted."""

    def __init__(
        self, service: str, metrics: GrpcServerMetrics, access: PlaneAccess, *, also: tuple[str, ...] = ()
    ) -> None:
        """service: the full name of the service that it is for. also: of others beside it."""
        self._services = (service, *also)
        self._access = access
        self._health = health.aio.HealthServicer()
        self.server = grpc.aio.server(
            options=_OPTIONS,
            interceptors=[
                *access.interceptors(partial(metrics.count_refused, service)),
                metrics.interceptor(),
                ErrorInterceptor(),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )

    async def start(self, flag: str, host: str, port: int) -> int:
        """Listens, says SERVING and returns the port. Errors: StartupError."""
        for address in addresses(host, flag):  # all that the name has, on one port
            port = self._listen(flag, address, port)
        await self.server.start()
        for name in ("", *self._services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    def _listen(self, flag: str, address: str, port: int) -> int:
        credentials, host_port = self._access.credentials(), join_host_port(address, port)
        try:
            if credentials is None:
                return self.server.add_insecure_port(host_port)
            return self.server.add_secure_port(host_port, credentials)
        except RuntimeError as error:
            raise StartupError(f"{flag} {host_port}: cannot listen there ({one_line(error)})") from None

    async def stop_serving(self) -> None:
        """Says NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, gives those under way `grace_s` seconds, and closes the port."""
        await self.server.stop(grace_s)
