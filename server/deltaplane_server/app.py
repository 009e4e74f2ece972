"""The one place where all is built: both planes, the engine between them, and the HTTP port."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics

from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.errors import DeltaplaneError
from deltaplane_server.access.plane_access import Access
from deltaplane_server.backend import Backend
from deltaplane_server.config import EngineConfig, ServerConfig
from deltaplane_server.interpreter import freeze_heap, share_fairly
from deltaplane_server.lifecycle import Lifecycle
from deltaplane_server.model_source import find_model
from deltaplane_server.network import check_can_listen, is_loopback, join_host_port
from deltaplane_server.server import Server
from deltaplane_server.signals import StopSignals
from deltaplane_server.startup import StartupError
from deltaplane_server.telemetry.http import HttpServer
from deltaplane_server.telemetry.logs import setup_logging

_FLAGS = {"kv_cache_bytes": "kv-cache-memory", "max_cpu_loras_bytes": "lora-host-memory"}
"""Options that are not called as their fields of EngineConfig are."""

BackendFactory = Callable[[EngineConfig], Backend]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of the data plane, of the control plane and of HTTP."""

    port: int
    admin_port: int
    http_port: int


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that serves."""

    ports: Ports
    server: Server


def run(config: ServerConfig, make_backend: BackendFactory | None = None) -> int:
    """Serves until a signal, and drains. Answers the exit code.

    make_backend: as in running_server().
    Errors: StartupError.
    """
    setup_logging(config.log_format, config.log_level)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # dates that nobody reads
    share_fairly()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, make_backend))


async def _serve(config: ServerConfig, make_backend: BackendFactory | None) -> int:
    signals = StopSignals()
    async with running_server(config, make_backend, on_loaded=freeze_heap) as running:
        signals.server_started()
        server = running.server
        waits = [asyncio.create_task(signals.wait()), asyncio.create_task(server.wait_for_failure())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    return 1 if server.has_failed else 0


@asynccontextmanager
async def running_server(
    config: ServerConfig,
    make_backend: BackendFactory | None = None,
    on_loaded: Callable[[], None] = lambda: None,
) -> AsyncIterator[RunningServer]:
    """A server that serves inside the block and drains at its end.

    make_backend: runs on a thread of its own; by default it loads the model of the configuration.
    on_loaded: called once all is there, before anything is served.
    Errors: StartupError.
    """
    begin = time.monotonic()
    access = Access.of(config)
    check_addresses(config, access)
    lifecycle, registry = Lifecycle(), CollectorRegistry()
    with _http_server(config, lifecycle, registry) as http:
        with _as_startup_errors(), ExitStack() as undo:
            if make_backend is None:
                make_backend = await asyncio.to_thread(_find_backend, config.engine)
            catalogue = _open_catalogue(config.state)
            undo.callback(catalogue.close)
            store = AdapterStore(config.upload_folder)
            undo.callback(store.close)
            backend = await asyncio.to_thread(make_backend, config.engine)
            server = Server(config, backend, catalogue, store, lifecycle, registry, access)
            on_loaded()
            undo.pop_all()
        try:
            with _as_startup_errors():
                port, admin_port = await server.start()
            ports = Ports(port, admin_port, http.port)
            _announce(config, ports, server, time.monotonic() - begin)
            _warn_of_what_is_open(config, access)
            yield RunningServer(ports, server)
        finally:
            await server.stop()


def check_addresses(config: ServerConfig, access: Access) -> None:
    """Errors: StartupError, where an address cannot be listened on or must not be."""
    is_guarded = access.control_plane.knows_callers or config.allow_insecure_admin
    if not is_guarded and not is_loopback(config.admin_host, "--admin-host"):
        raise StartupError(
            f"--admin-host {config.admin_host} is not a loopback address, and the control plane would ask "
            "nobody there who they are: give it --admin-token-file, or TLS with --admin-tls-client-ca-file, "
            "keep it on 127.0.0.1, or pass --allow-insecure-admin if the network around it is trusted"
        )
    for flag, host, port in (
        ("--port", config.host, config.port),
        ("--admin-port", config.admin_host, config.admin_port),
        ("--http-port", config.http_host, config.http_port),
    ):
        check_can_listen(flag, host, port)


def _open_catalogue(state: str) -> Catalogue:
    if state != ":memory:":
        folder = Path(state).absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(
                f"--state {state}: its folder cannot be made ({error.strerror}); name a file that may be "
                'written, or ":memory:" to forget the catalogue at the end'
            ) from None
    return Catalogue(state)


def _find_backend(config: EngineConfig) -> BackendFactory:
    """What loads the model; imports torch only once the model is there."""
    folder = find_model(config.model)
    from deltaplane_server.loading import load_backend

    return partial(load_backend, folder=folder)


@contextmanager
def _http_server(
    config: ServerConfig, lifecycle: Lifecycle, registry: CollectorRegistry
) -> Iterator[HttpServer]:
    host, port = config.http_host, config.http_port
    try:
        server = HttpServer(host, port, registry, alive=lifecycle.alive, ready=lifecycle.ready)
    except OSError as error:
        raise StartupError(
            f"--http-port {join_host_port(host, port)}: cannot listen there ({error})"
        ) from None
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _as_startup_errors() -> Iterator[None]:
    try:
        yield
    except DeltaplaneError as error:
        raise StartupError(_with_flag(error)) from error


def _with_flag(error: DeltaplaneError) -> str:
    """The message, with the option in place of the field of EngineConfig that it is for."""
    known = {field.name for field in fields(EngineConfig)}
    for violation in getattr(error, "violations", ()):
        if violation.field in known:
            flag = _FLAGS.get(violation.field, violation.field.replace("_", "-"))
            return f"--{flag}: {violation.description}"
    return error.message


def _announce(config: ServerConfig, ports: Ports, server: Server, seconds: float) -> None:
    """Tells people in the log, and programs in the ports file."""
    capacity = server.manager.capacity()
    with_dora = server.manager.capacity([capacity.max_lora_rank + 1])
    fits = {f"rank {fit.rank}": fit for fit in capacity.by_rank}
    fits[f"rank {capacity.max_lora_rank} with DoRA"] = with_dora.by_rank[0]
    log.info(
        "server.capacity",
        slots=capacity.slots,
        rank_pages=capacity.rank_pages,
        on_device={what: fit.fit_available for what, fit in fits.items()},
        in_host_memory={what: fit.fit_host for what, fit in fits.items()},
    )
    log.info(
        "server.ready",
        model=config.engine.served_model_name,
        seconds=round(seconds, 1),
        data_plane=join_host_port(config.host, ports.port),
        control_plane=join_host_port(config.admin_host, ports.admin_port),
        http=join_host_port(config.http_host, ports.http_port),
    )
    if config.ports_file is not None:
        _write_whole(config.ports_file, json.dumps(asdict(ports)))


def _warn_of_what_is_open(config: ServerConfig, access: Access) -> None:
    """Tells of a control plane that anyone reaches, and of tokens that the network can read."""
    if not access.control_plane.knows_callers and not is_loopback(config.admin_host, "--admin-host"):
        log.warning("access.control_plane_is_open", address=f"--admin-host {config.admin_host}")
    for flag, host, plane in (
        ("--host", config.host, access.data_plane),
        ("--admin-host", config.admin_host, access.control_plane),
    ):
        if plane.has_tokens and not plane.has_tls and not is_loopback(host, flag):
            log.warning("access.tokens_in_plain_text", address=f"{flag} {host}", mend="--tls-cert-file")


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that a reader never sees half of. Errors: StartupError."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        raise StartupError(
            f"--ports-file {path} cannot be written ({error.strerror}); check the path"
        ) from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
