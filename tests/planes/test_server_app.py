"""A whole server: how it starts, what it refuses to start with, and how it ends."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from certificates import Authority
from deltaplane.v1 import adapters_pb2 as ap
from deltaplane.v1 import generation_pb2 as pb
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceStub
from deltaplane.v1.generation_pb2_grpc import GenerationServiceStub
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.app import RunningServer, running_server
from deltaplane_server.backend import Backend
from deltaplane_server.config import EngineConfig, LoraModule, ServerConfig
from deltaplane_server.network import addresses, join_host_port
from deltaplane_server.startup import StartupError
from fake_backend import FakeBackend, server_config
from fakes import FakePool, write_adapter

SERVICES = {
    "port": ["deltaplane.v1.GenerationService"],
    "admin_port": ["deltaplane.v1.AdapterService", "deltaplane.v1.OperationService"],
}


def address(running: RunningServer, port: str = "port") -> str:
    return f"127.0.0.1:{getattr(running.ports, port)}"


def request(max_tokens: int = 5) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="hello", sampling=pb.SamplingParams(temperature=0), stop=pb.StopCondition(max_tokens=max_tokens)
    )


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    assert holds()


async def refusal_to_start(
    config: ServerConfig, backend: Callable[[EngineConfig], Backend] | None = None
) -> str:
    with pytest.raises(StartupError) as caught:
        async with running_server(config, backend or FakeBackend()):
            pass
    return str(caught.value)


async def eventually_not_serving(channel: grpc.aio.Channel) -> None:
    for _ in range(1000):
        if await health(channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("still serving")


async def http(running: RunningServer, path: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address(running, 'http_port')}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def health(channel: grpc.aio.Channel, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


# How it starts.


@pytest.mark.parametrize("port", SERVICES)
async def test_both_ports_tell_their_health_and_their_services(port: str) -> None:
    async with (
        running_server(server_config(), FakeBackend()) as running,
        grpc.aio.insecure_channel(address(running, port)) as channel,
    ):
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", *SERVICES[port]):
            assert await health(channel, service) == serving
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {*SERVICES[port], "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_adapters_of_the_command_line_are_resident_when_it_is_ready(tmp_path: Path) -> None:
    modules = tuple(
        LoraModule(name, str(write_adapter(tmp_path / name, content=name))) for name in ("a", "b", "c")
    )
    async with (
        running_server(server_config(lora_modules=modules), FakeBackend()) as running,
        grpc.aio.insecure_channel(address(running, "admin_port")) as channel,
    ):
        stub: Any = AdapterServiceStub(channel)
        slots = await stub.ListSlots(ap.ListSlotsRequest())
        assert [slot.adapter for slot in slots.slots] == ["a", "b"]
        listed = await stub.ListAdapters(ap.ListAdaptersRequest())
        assert [adapter.name for adapter in listed.adapters] == ["a", "b", "c"]
        capacity = await stub.GetCapacity(ap.GetCapacityRequest())
        assert (capacity.kv_pages, capacity.free_kv_pages, capacity.kv_page_size) == (64, 64, 16)
        memory = {share.purpose: share.bytes for share in capacity.memory}
        metrics = await http(running, "/metrics")
        assert 'deltaplane_adapters{state="resident"} 2.0' in metrics
        assert 'deltaplane_adapters{state="registered"} 1.0' in metrics
        assert memory == {"weights": 1000, "kv_pages": 2000, "host_cache": 1 << 30}


async def test_the_catalogue_outlives_the_server(tmp_path: Path) -> None:
    state = str(tmp_path / "made" / "on demand" / "state.sqlite3")
    modules = (LoraModule("a", str(write_adapter(tmp_path / "a"))),)
    async with running_server(server_config(state=state, lora_modules=modules), FakeBackend()):
        pass
    async with running_server(server_config(state=state), FakeBackend()) as running:
        assert running.server.manager.get("a").version == 1


async def test_host_memory_may_be_told_in_adapters() -> None:
    backend = FakeBackend()
    async with running_server(server_config(max_cpu_loras=3), backend) as running:
        assert running.server.manager.capacity().host.total_bytes == 3 * 2 * backend.pool.page_bytes


async def test_the_watches_of_a_server_are_bounded() -> None:
    async with (
        running_server(server_config(max_watches=1), FakeBackend()) as running,
        grpc.aio.insecure_channel(address(running, "admin_port")) as channel,
    ):
        stub: Any = AdapterServiceStub(channel)
        watch = stub.WatchAdapters(ap.WatchAdaptersRequest())
        assert (await anext(aiter(watch))).type == ap.ADAPTER_EVENT_TYPE_SNAPSHOT_END
        with pytest.raises(grpc.aio.AioRpcError, match="raise the limit") as caught:
            await anext(aiter(stub.WatchAdapters(ap.WatchAdaptersRequest())))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watch.cancel()


async def test_the_capacity_at_start_tells_of_dora() -> None:
    backend = FakeBackend()
    backend.pool = FakePool(num_slots=2, num_pages=4)
    with structlog.testing.capture_logs() as logs:
        async with running_server(server_config(), backend):
            pass
    told = next(line for line in logs if line["event"] == "server.capacity")
    assert told["on_device"] == {"rank 8": 2, "rank 16": 2, "rank 16 with DoRA": 1}
    assert told["in_host_memory"].keys() == told["on_device"].keys()


async def test_programs_find_the_ports_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    async with running_server(server_config(ports_file=file), FakeBackend()) as running:
        ports = json.loads(file.read_text())
        assert ports == {
            "port": running.ports.port,
            "admin_port": running.ports.admin_port,
            "http_port": running.ports.http_port,
        }
        assert len(set(ports.values())) == 3


async def test_metrics_and_checks_are_served_over_http() -> None:
    async with (
        running_server(server_config(vllm_metrics=True), FakeBackend()) as running,
        grpc.aio.insecure_channel(address(running)) as channel,
    ):
        stub: Any = GenerationServiceStub(channel)
        assert [response async for response in stub.Generate(request())]
        assert await http(running, "/healthz") == await http(running, "/readyz") == "ok\n"
        await eventually(lambda: running.server.engine.stats().num_running == 0)
        metrics = await http(running, "/metrics")
        assert "deltaplane_generation_tokens_total 5.0" in metrics
        assert 'deltaplane_requests_finished_total{reason="length"} 1.0' in metrics
        assert "deltaplane_kv_pages_total 64.0" in metrics
        assert 'grpc_method="Generate"' in metrics
        assert 'vllm:num_requests_running{model_name="base"} 0.0' in metrics
        assert 'vllm:lora_requests_info{max_lora="2"' in metrics


async def test_http_says_starting_while_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    seen: list[str] = []

    def load(config: EngineConfig) -> Backend:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10)
        with caught.value as error:
            seen.append(f"{error.code} {error.read().decode()}")
        return FakeBackend()(config)

    async with running_server(server_config(http_port=port), load):
        assert seen == ["503 starting\n"]


# What it refuses to start with.


@pytest.mark.parametrize("flag", ["port", "admin_port", "http_port"])
async def test_a_port_in_use_is_named(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        message = await refusal_to_start(server_config(**{flag: taken}))
    assert message.startswith(f"--{flag.replace('_', '-')} 127.0.0.1:{taken}: the port is in use")


async def test_two_servers_do_not_share_a_port() -> None:
    async with running_server(server_config(), FakeBackend()) as running:
        message = await refusal_to_start(server_config(port=running.ports.port))
        assert "the port is in use" in message


async def test_a_control_plane_that_knows_nobody_stays_on_this_machine(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue()
    tls: dict[str, Any] = {"tls_cert_file": pair.certificate, "tls_key_file": pair.key}
    for more in ({}, tls):
        message = await refusal_to_start(server_config(admin_host="0.0.0.0", **more))
        assert message.startswith("--admin-host 0.0.0.0 is not a loopback address")
        for mend in (
            "--admin-token-file",
            "--admin-tls-client-ca-file",
            "--allow-insecure-admin",
            "127.0.0.1",
        ):
            assert mend in message


@pytest.mark.parametrize("guard", ["token", "client certificates", "nothing"])
async def test_a_control_plane_elsewhere_needs_to_know_its_callers(guard: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue()
    (tmp_path / "tokens").write_text("a" * 32)
    guards: dict[str, dict[str, Any]] = {
        "token": {"admin_token_file": tmp_path / "tokens"},
        "client certificates": {
            "tls_cert_file": pair.certificate,
            "tls_key_file": pair.key,
            "admin_tls_client_ca_file": authority.file,
        },
        "nothing": {"allow_insecure_admin": True},
    }
    config = server_config(admin_host="0.0.0.0", **guards[guard])
    with structlog.testing.capture_logs() as logs:
        async with running_server(config, FakeBackend()) as running:
            assert running.ports.admin_port
    warnings = [entry["address"] for entry in logs if entry["event"] == "access.tokens_in_plain_text"]
    assert warnings == (["--admin-host 0.0.0.0"] if guard == "token" else [])


async def test_a_file_of_access_that_cannot_be_used_is_named_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    def load(config: EngineConfig) -> Backend:
        raise AssertionError("the model is loaded")

    missing = tmp_path / "tokens"
    message = await refusal_to_start(server_config(admin_token_file=missing), load)
    assert message.startswith(f"--admin-token-file {missing}: it cannot be read")


async def test_a_name_is_listened_on_by_all_its_addresses_and_one_port() -> None:
    async with running_server(server_config(host="localhost"), FakeBackend()) as running:
        for host in addresses("localhost", "--host"):
            target = join_host_port(host, running.ports.port)
            async with grpc.aio.insecure_channel(target) as channel:
                assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING


async def test_a_catalogue_in_use_is_named(tmp_path: Path) -> None:
    state = str(tmp_path / "state.sqlite3")
    async with running_server(server_config(state=state), FakeBackend()):
        assert state in await refusal_to_start(server_config(state=state))


async def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = await refusal_to_start(server_config(state=str(tmp_path / "file" / "state.sqlite3")))
    assert message.startswith(f"--state {tmp_path}/file/state.sqlite3: its folder cannot be made")


async def test_an_adapter_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    module = LoraModule("huge", str(write_adapter(tmp_path / "huge", rank=64)))
    message = await refusal_to_start(server_config(lora_modules=(module,)))
    assert message.startswith(f"--lora-modules huge={module.source}: ")
    assert "rank 64 is over --max-lora-rank 16" in message


async def test_what_the_backend_refuses_is_told_with_its_option() -> None:
    def refuse(config: EngineConfig) -> Backend:
        raise InvalidArgumentError.for_field("kv_cache_bytes", "more KV than memory")

    assert await refusal_to_start(server_config(), refuse) == "--kv-cache-memory: more KV than memory"


async def test_a_ports_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    message = await refusal_to_start(server_config(ports_file=tmp_path / "missing" / "ports.json"))
    assert "--ports-file" in message


# How it ends.


def reasons_of(error: grpc.aio.AioRpcError) -> set[str]:
    """The reason of an error, and the kinds of its details."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        detail.Unpack(info)
    return {info.reason, *(detail.TypeName() for detail in status.details)}


async def test_draining_lets_streams_end_and_refuses_new_ones() -> None:
    backend = FakeBackend()
    async with (
        running_server(server_config(drain_timeout_s=30.0), backend) as running,
        grpc.aio.insecure_channel(address(running)) as channel,
    ):
        stub: Any = GenerationServiceStub(channel)
        backend.runner.gate.clear()
        call = stub.Generate(request(max_tokens=20))
        await eventually(lambda: running.server.engine.stats().num_running == 1)
        stopping = asyncio.create_task(running.server.stop())
        error = await refused_while_draining(channel)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "DRAINING" in reasons_of(error)
        assert error_details_pb2.RetryInfo.DESCRIPTOR.full_name in reasons_of(error)
        for service in ("", *SERVICES["port"]):
            assert await health(channel, service) == health_pb2.HealthCheckResponse.NOT_SERVING
        backend.runner.gate.set()
        responses = [response async for response in call]
        assert responses[-1].finish.reason == pb.FINISH_REASON_LENGTH
        assert responses[-1].usage.completion_tokens == 20
        await stopping


async def refused_while_draining(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    """The answer to a new request once the server drains; what comes earlier waits for its deadline."""
    stub: Any = GenerationServiceStub(channel)
    for _ in range(100):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request(), timeout=0.2).read()
        if caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            break
    return caught.value


async def test_what_outlasts_the_drain_timeout_is_aborted() -> None:
    backend = FakeBackend()
    async with (
        running_server(server_config(drain_timeout_s=0.1), backend) as running,
        grpc.aio.insecure_channel(address(running)) as channel,
    ):
        stub: Any = GenerationServiceStub(channel)
        backend.runner.gate.clear()
        call = stub.Generate(request(max_tokens=200))
        await eventually(lambda: running.server.engine.stats().num_running == 1)
        stopping = asyncio.create_task(running.server.stop())
        await asyncio.sleep(0.2)
        backend.runner.gate.set()
        responses = [response async for response in call]
        assert responses[-1].finish.reason == pb.FINISH_REASON_ABORTED
        await stopping
        assert running.server.engine.stats().kv_pages_free == 64


async def test_stopping_twice_is_stopping_once() -> None:
    async with running_server(server_config(), FakeBackend()) as running:
        await running.server.stop()
        await running.server.stop()


async def test_a_failed_engine_is_seen_from_outside() -> None:
    async with (
        running_server(server_config(), FakeBackend()) as running,
        grpc.aio.insecure_channel(address(running)) as channel,
    ):

        def fail() -> None:
            raise RuntimeError("a fault of the engine")

        running.server.engine.step = fail  # type: ignore[assignment, method-assign]
        stub: Any = GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request()).read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        await asyncio.wait_for(running.server.wait_for_failure(), 30)
        assert running.server.has_failed
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            await http(running, "/healthz")
        with unhealthy.value as error:
            assert error.code == 503
        await eventually_not_serving(channel)
