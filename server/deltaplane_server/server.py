"""A server: the adapter manager, the engine and both planes, made from one configuration and one backend."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, Gauge, Info

from deltaplane.v1 import adapters_pb2_grpc, generation_pb2_grpc, operations_pb2_grpc
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.composition import max_composition_rows
from deltaplane_controlplane.errors import DeltaplaneError, ResourceExhaustedError
from deltaplane_controlplane.manager import AdapterManager, ManagerConfig
from deltaplane_controlplane.operation_service import OperationServicer
from deltaplane_controlplane.ports import ServerFigures
from deltaplane_controlplane.service import AdapterServicer
from deltaplane_controlplane.uploads import UploadLimits, Uploads
from deltaplane_controlplane.versions import Tier
from deltaplane_server.access.plane_access import Access
from deltaplane_server.adapters.file_bounds import file_bounds
from deltaplane_server.adapters.remote.addresses import AllowedSources, is_remote, parse_prefix
from deltaplane_server.adapters.remote.bucket import check_installed
from deltaplane_server.adapters.remote.fetcher import FetchLimits, RemoteFetcher
from deltaplane_server.adapters.remote.host import FileBounds
from deltaplane_server.backend import Backend
from deltaplane_server.config import LoraModule, ServerConfig
from deltaplane_server.dataplane.admission import Admission
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.dataplane.model_card import model_card
from deltaplane_server.dataplane.prompts import Prompts
from deltaplane_server.dataplane.service import GenerationServicer
from deltaplane_server.engine.async_engine import AsyncEngine
from deltaplane_server.engine.engine import Engine
from deltaplane_server.lifecycle import Lifecycle, Phase
from deltaplane_server.plane import Plane
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.startup import StartupError
from deltaplane_server.telemetry.collectors import AdapterCollector, EngineCollector, VllmCollector
from deltaplane_server.telemetry.grpc_metrics import GrpcServerMetrics
from deltaplane_server.telemetry.metrics import EngineMetrics
from deltaplane_server.telemetry.request_log import RequestLog
from deltaplane_server.version import VERSION

_LAST_WORDS_S = 5.0
"""How long a stream may take to send its last messages when the server stops."""

_ENGINE_CHECK_S = 0.5

log = structlog.get_logger(__name__)


class Server:
    """Both planes over one engine and one adapter manager.

    manager, engine: for those who embed a server.
    """

    def __init__(
        self,
        config: ServerConfig,
        backend: Backend,
        catalogue: Catalogue,
        store: AdapterStore,
        lifecycle: Lifecycle,
        registry: CollectorRegistry,
        access: Access,
    ) -> None:
        """Takes the catalogue and the store over. Errors: those of AdapterManager."""
        self._config = config
        self._lifecycle = lifecycle
        self._failed = asyncio.Event()
        self._stopping = asyncio.Lock()
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self._store = store
        self._access = access
        self._fetcher = _make_fetcher(config, backend, store)
        self.manager = _make_manager(config, backend, catalogue, store, self._fetcher)
        self.engine = Engine(
            Scheduler(backend.scheduler),
            backend.runner,
            backend.tokenizer,
            max_waiting=config.engine.max_waiting,
            observer=EngineMetrics(registry),
        )
        self.manager.set_hooks(
            on_ready=self.engine.wake,
            on_expel=self.engine.abort_adapter,
            on_gone=self.engine.forget_adapter,
        )
        self._streams = AsyncEngine(self.engine)
        self._limits = _request_limits(backend)
        self._prompts = Prompts(backend.tokenizer, self._limits)
        self._admin = AdapterServicer(
            self.manager, self._figures, Uploads(self.manager, store, _upload_limits(config, backend))
        )
        self._backend = backend
        grpc_metrics = GrpcServerMetrics(registry)
        self._data_plane = self._make_data_plane(grpc_metrics)
        self._control_plane = self._make_control_plane(grpc_metrics)
        self._collect(registry)

    async def start(self) -> tuple[int, int]:
        """Registers the adapters of the command line, then serves; answers the ports of both planes.

        Errors: StartupError and the errors of deltaplane's tree.
        """
        await self._streams.start()
        await self._bring_adapters()
        config = self._config
        admin_port = await self._control_plane.start("--admin-port", config.admin_host, config.admin_port)
        port = await self._data_plane.start("--port", config.host, config.port)
        self._tasks = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._access.follow())]
        self._lifecycle.phase = Phase.SERVING
        return port, admin_port

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed, which only a restart mends."""
        return self._failed.is_set()

    async def wait_for_failure(self) -> None:
        """Returns when the engine has failed."""
        await self._failed.wait()

    async def stop(self) -> None:
        """Refuses new requests, gives running streams the drain timeout, aborts the rest, and ends all.
        Idempotent."""
        async with self._stopping:
            if not self._stopped:
                self._stopped = True
                await self._drain()
                await self._close()

    async def _drain(self) -> None:
        self._lifecycle.phase = Phase.DRAINING
        await self._stop_serving()
        log.info("server.draining", timeout_s=self._config.drain_timeout_s, **self._load())
        if not await self._streams.drain(self._config.drain_timeout_s):
            log.warning("server.drain_timed_out", **self._load())
        await self._data_plane.stop(_LAST_WORDS_S)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._streams.stop()
        await asyncio.to_thread(self.manager.close)
        await asyncio.to_thread(self._fetcher.close)
        await self._control_plane.stop(_LAST_WORDS_S)
        await asyncio.to_thread(self._admin.close)
        await asyncio.to_thread(self._store.close)
        self._prompts.close()
        log.info("server.stopped")

    async def _stop_serving(self) -> None:
        """Tells whoever checks the health of either plane."""
        for plane in (self._data_plane, self._control_plane):
            await plane.stop_serving()

    def _load(self) -> dict[str, int]:
        stats = self.engine.stats()
        return {"running": stats.num_running, "waiting": stats.num_waiting}

    def _make_data_plane(self, metrics: GrpcServerMetrics) -> Plane:
        plane = Plane("deltaplane.v1.GenerationService", metrics, self._access.data_plane)
        config, backend = self._config, self._backend
        servicer = GenerationServicer(
            model_card(config.engine, backend.facts, self._limits, backend.scheduler),
            self._limits,
            self._prompts,
            Admission(self._limits, self._prompts, self.manager, self._streams, config.engine.seed),
            self._streams,
            RequestLog(log_prompts=config.log_prompts),
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, plane.server)
        return plane

    def _make_control_plane(self, metrics: GrpcServerMetrics) -> Plane:
        plane = Plane(
            "deltaplane.v1.AdapterService",
            metrics,
            self._access.control_plane,
            also=("deltaplane.v1.OperationService",),
        )
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self._admin, plane.server)
        operations = OperationServicer(self.manager.operations)
        operations_pb2_grpc.add_OperationServiceServicer_to_server(operations, plane.server)
        return plane

    def _collect(self, registry: CollectorRegistry) -> None:
        """Has the metrics that are read at a scrape read."""
        engine, manager = self.engine, self.manager
        registry.register(EngineCollector(engine.stats))
        registry.register(
            AdapterCollector(manager.stats, manager.slots, manager.capacity, manager.count_states)
        )
        name = self._config.engine.served_model_name
        if self._config.vllm_metrics:
            registry.register(VllmCollector(engine.stats, manager.stats, name, self._backend.pool.num_slots))
        facts = self._backend.facts
        Info("deltaplane_server", "What is served.", registry=registry).info(
            {"version": VERSION, "model": name, "dtype": facts.dtype, "device": facts.device}
        )
        if (access := self._access.data_plane).has_tls:  # both planes show the same certificate
            expiry = "deltaplane_tls_certificate_expiry_timestamp_seconds"
            gauge = Gauge(expiry, "When the server's certificate expires.", registry=registry)
            gauge.set_function(lambda: access.certificate_expires)

    def _figures(self) -> ServerFigures:
        """For GetCapacity."""
        stats = self.engine.stats()
        return ServerFigures(
            kv_pages=stats.kv_pages_total,
            free_kv_pages=stats.kv_pages_free,
            kv_page_size=self._backend.scheduler.page_size,
            memory={
                **self._backend.memory,
                "host_cache": self._config.engine.host_cache_bytes(self._backend.pool.page_bytes),
            },
        )

    async def _bring_adapters(self) -> None:
        """Registers the adapters of the command line and loads as many of them as there are slots."""
        modules = self._config.lora_modules
        for module in modules:
            with _naming(module):
                await asyncio.to_thread(self.manager.register_trusted, module.name, module.source)
        self.manager.start()
        for module in modules[: self._backend.pool.num_slots]:
            with _naming(module):
                await self._load_adapter(module.name)

    async def _load_adapter(self, name: str) -> None:
        try:
            await asyncio.wrap_future(self.manager.start_load(name, Tier.DEVICE))
        except ResourceExhaustedError as error:
            log.warning("adapter.stays_cold", adapter=name, reason=error.message)

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(_ENGINE_CHECK_S)
            if not self.engine.is_alive:
                break
        self._lifecycle.failure = "the engine has failed"
        await self._stop_serving()
        self._failed.set()
        log.error("server.engine_failed")


def _make_manager(
    config: ServerConfig,
    backend: Backend,
    catalogue: Catalogue,
    store: AdapterStore,
    fetcher: RemoteFetcher,
) -> AdapterManager:
    return AdapterManager(
        loader=backend.loader,
        pool=backend.pool,
        config=ManagerConfig(
            max_lora_rank=config.engine.max_lora_rank,
            host_cache_bytes=config.engine.host_cache_bytes(backend.pool.page_bytes),
            allowed_roots=config.adapter_roots,
            max_watches=config.max_watches,
        ),
        catalogue=catalogue,
        store=store,
        fetcher=fetcher,
    )


def _make_fetcher(config: ServerConfig, backend: Backend, store: AdapterStore) -> RemoteFetcher:
    """One for what is allowed, and for the adapters of the command line.

    Errors: FailedPreconditionError (a package that these need is not installed).
    """
    sources = [module.source for module in config.lora_modules]
    allowed = [*config.adapter_sources, *(parse_prefix(source) for source in sources if is_remote(source))]
    if any(address.scheme == "s3" for address in allowed):
        check_installed()
    limits = FetchLimits(total_timeout_s=config.fetch_timeout_s)
    return RemoteFetcher(store, AllowedSources(allowed), _bounds(config, backend), limits)


def _bounds(config: ServerConfig, backend: Backend) -> FileBounds:
    return file_bounds(backend.facts, config.engine.max_lora_rank, backend.pool.page_bytes)


def _upload_limits(config: ServerConfig, backend: Backend) -> UploadLimits:
    bounds = _bounds(config, backend)
    return UploadLimits(bounds.max_config_bytes, bounds.max_weights_bytes)


def _request_limits(backend: Backend) -> RequestLimits:
    return RequestLimits(
        vocab_size=backend.facts.vocab_size,
        max_model_len=backend.scheduler.max_model_len,
        kv_tokens=backend.scheduler.kv_tokens,
        eos_token_ids=backend.facts.eos_token_ids,
        has_chat_template=backend.tokenizer.has_chat_template,
        max_adapters=backend.pool.num_slots,
        max_composition_rows=max_composition_rows(backend.pool.num_pages),
    )


@contextmanager
def _naming(module: LoraModule) -> Iterator[None]:
    """Errors of an adapter of the command line, with its name."""
    try:
        yield
    except DeltaplaneError as error:
        raise StartupError(f"--lora-modules {module.name}={module.source}: {error.message}") from error
