"""Who may call a server: TLS, client certificates and tokens, on both planes and by every kind of call."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from certificates import Authority, Pair
from deltaplane import AsyncClient, ChannelConfig, Client, errors, tls_credentials, token_from_file
from deltaplane.cli.main import main as deltactl
from deltaplane.v1 import adapters_pb2 as ap
from deltaplane.v1 import generation_pb2 as pb
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceStub
from deltaplane.v1.generation_pb2_grpc import GenerationServiceStub
from deltaplane_controlplane.interceptor import DETAILS_KEY
from deltaplane_server.access import interceptor, plane_access
from deltaplane_server.app import RunningServer, running_server
from fake_backend import FakeBackend, server_config
from fakes import write_adapter

API_TOKEN, ADMIN_TOKEN, OTHER_TOKEN = "a" * 32, "b" * 32, "c" * 32

Metadata = tuple[tuple[str, str], ...]


@pytest.fixture(autouse=True)
def files_are_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_access, "_LOOK_EVERY_S", 0.01)


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Any]:
    """Configuration of a server that wants tokens."""
    files = {"api_token_file": API_TOKEN, "admin_token_file": ADMIN_TOKEN}
    return {field: write(tmp_path / field, token) for field, token in files.items()}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls(pair: Pair, **more: Any) -> dict[str, Any]:
    """Configuration of a server with TLS."""
    return {"tls_cert_file": pair.certificate, "tls_key_file": pair.key, **more}


def write(path: Path, text: str) -> Path:
    """Puts a file in place whole, as programs that rotate do."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
    return path


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def address(running: RunningServer) -> str:
    return f"127.0.0.1:{running.ports.port}"


def admin_address(running: RunningServer) -> str:
    return f"127.0.0.1:{running.ports.admin_port}"


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(2000):
        if await holds():
            return
        await asyncio.sleep(0.005)
    assert await holds()


# What is called: each answers by raising what the call raised.


async def get_model(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    await GenerationServiceStub(channel).GetModel(pb.GetModelRequest(), metadata=metadata)


async def generate(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    request = pb.GenerateRequest(text="hello", stop=pb.StopCondition(max_tokens=2))
    stub: Any = GenerationServiceStub(channel)
    assert [response async for response in stub.Generate(request, metadata=metadata)]


async def list_slots(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    await AdapterServiceStub(channel).ListSlots(ap.ListSlotsRequest(), metadata=metadata)


async def watch(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    stub: Any = AdapterServiceStub(channel)
    call = stub.WatchAdapters(ap.WatchAdaptersRequest(), metadata=metadata)
    assert (await call.read()).type == ap.ADAPTER_EVENT_TYPE_SNAPSHOT_END
    call.cancel()


async def upload(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    """Passes where the handler itself is reached, which refuses an upload without a header."""
    stub: Any = AdapterServiceStub(channel)
    call = stub.UploadAdapter(iter([ap.UploadAdapterRequest(chunk=b"abc")]), metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    if caught.value.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        raise caught.value


async def reflect(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    call = stub.ServerReflectionInfo(requests, metadata=metadata)
    assert (await call.read()).HasField("list_services_response")
    call.cancel()


@dataclass(frozen=True)
class Method:
    """A call, and the port and the token that it is for."""

    call: Callable[[grpc.aio.Channel, Metadata], Awaitable[None]]
    address: Callable[[RunningServer], str]
    token: str

    def __str__(self) -> str:
        return f"{self.call.__name__} {self.address.__name__}"


METHODS = [
    Method(get_model, address, API_TOKEN),
    Method(generate, address, API_TOKEN),
    Method(reflect, address, API_TOKEN),
    Method(list_slots, admin_address, ADMIN_TOKEN),
    Method(watch, admin_address, ADMIN_TOKEN),
    Method(upload, admin_address, ADMIN_TOKEN),
    Method(reflect, admin_address, ADMIN_TOKEN),
]


async def refusal(method: Method, running: RunningServer, metadata: Metadata) -> str:
    """The reason with which a call is refused."""
    async with grpc.aio.insecure_channel(method.address(running)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method.call(channel, metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    trailers: dict[str, Any] = dict(caught.value.trailing_metadata() or ())
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(trailers[DETAILS_KEY]).details[0].Unpack(info)
    assert info.domain == "deltaplane"
    return str(info.reason)


# Tokens.


@pytest.mark.parametrize("method", METHODS, ids=str)
async def test_every_kind_of_call_needs_the_token_of_its_plane(
    method: Method, tokens: dict[str, Any]
) -> None:
    other = ADMIN_TOKEN if method.token == API_TOKEN else API_TOKEN
    async with running_server(server_config(**tokens), FakeBackend()) as running:
        assert await refusal(method, running, ()) == "TOKEN_MISSING"
        for metadata in (
            bearer(other),
            bearer(method.token + "x"),
            bearer(method.token[:-1]),
            bearer(""),
            (("authorization", method.token),),
            (("authorization", f"Basic {method.token}"),),
            bearer(OTHER_TOKEN) + bearer(method.token),
        ):
            assert await refusal(method, running, metadata) == "TOKEN_NOT_ACCEPTED"
        async with grpc.aio.insecure_channel(method.address(running)) as channel:
            await method.call(channel, bearer(method.token))
            await method.call(channel, (("authorization", f"bearer  {method.token}"),))
        # A handler that was found for a call with a token is not kept for those without.
        assert await refusal(method, running, ()) == "TOKEN_MISSING"


@pytest.mark.parametrize("port", [address, admin_address])
async def test_health_is_open(port: Callable[[RunningServer], str], tokens: dict[str, Any]) -> None:
    async with (
        running_server(server_config(**tokens), FakeBackend()) as running,
        grpc.aio.insecure_channel(port(running)) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        assert await stub.Check(health_pb2.HealthCheckRequest()) == serving
        call = stub.Watch(health_pb2.HealthCheckRequest())
        assert await call.read() == serving
        call.cancel()


async def test_one_plane_may_be_guarded_alone(tokens: dict[str, Any]) -> None:
    del tokens["api_token_file"]
    async with running_server(server_config(**tokens), FakeBackend()) as running:
        async with grpc.aio.insecure_channel(address(running)) as channel:
            await generate(channel, ())
        assert await refusal(METHODS[3], running, ()) == "TOKEN_MISSING"


async def test_a_method_that_is_not_there_is_unimplemented(tokens: dict[str, Any]) -> None:
    async with (
        running_server(server_config(**tokens), FakeBackend()) as running,
        grpc.aio.insecure_channel(address(running)) as channel,
    ):
        call: Any = channel.unary_unary("/deltaplane.v1.GenerationService/None")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_refused_call_is_not_parsed(tokens: dict[str, Any]) -> None:
    """Bytes that are no message at all would be an INTERNAL error of the parser."""
    async with (
        running_server(server_config(**tokens), FakeBackend()) as running,
        grpc.aio.insecure_channel(address(running)) as channel,
        grpc.aio.insecure_channel(admin_address(running)) as admin,
    ):
        get_model: Any = channel.unary_unary("/deltaplane.v1.GenerationService/GetModel")
        upload: Any = admin.stream_unary("/deltaplane.v1.AdapterService/UploadAdapter")
        for message in (b"\xff" * 10, b"\xff" * (8 << 20)):
            for call in (get_model(message), upload(iter([message]))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_refused_stream_need_not_begin(
    tokens: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "_FIRST_MESSAGE_S", 0.01)
    async with (
        running_server(server_config(**tokens), FakeBackend()) as running,
        grpc.aio.insecure_channel(admin_address(running)) as channel,
    ):
        call: Any = channel.stream_unary("/deltaplane.v1.AdapterService/UploadAdapter")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_refusals_are_counted_and_logged_and_tokens_are_not(tokens: dict[str, Any]) -> None:
    async with running_server(server_config(**tokens), FakeBackend()) as running:
        with structlog.testing.capture_logs() as logs:
            await refusal(METHODS[0], running, bearer(OTHER_TOKEN))
            await refusal(METHODS[3], running, ())
            async with grpc.aio.insecure_channel(address(running)) as channel:
                await generate(channel, bearer(API_TOKEN))
        refused = [entry for entry in logs if entry["event"] == "rpc.unauthenticated"]
        assert [(entry["method"], entry["reason"]) for entry in refused] == [
            ("/deltaplane.v1.GenerationService/GetModel", "TOKEN_NOT_ACCEPTED"),
            ("/deltaplane.v1.AdapterService/ListSlots", "TOKEN_MISSING"),
        ]
        assert all(entry["peer"].startswith("ipv4:127.0.0.1") for entry in refused)
        assert any(entry["event"] == "request" for entry in logs)
        assert not [token for token in (API_TOKEN, ADMIN_TOKEN, OTHER_TOKEN) if token in repr(logs)]
        metrics = await scrape(running)
    service = 'grpc_service="deltaplane.v1.GenerationService",reason="TOKEN_NOT_ACCEPTED"'
    assert f"deltaplane_unauthenticated_calls_total{{{service}}} 1.0" in metrics


async def scrape(running: RunningServer) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.ports.http_port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = await reader.read()
    writer.close()
    await writer.wait_closed()
    return text.decode()


async def test_tokens_are_replaced_without_a_restart(tokens: dict[str, Any]) -> None:
    file: Path = tokens["api_token_file"]
    method = METHODS[0]

    async def is_accepted(token: str) -> bool:
        async with grpc.aio.insecure_channel(address(running)) as channel:
            try:
                await method.call(channel, bearer(token))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return False
            return True

    async with running_server(server_config(**tokens), FakeBackend()) as running:
        assert await is_accepted(API_TOKEN)
        write(file, f"# both, until all clients have the new one\n{API_TOKEN}  # old\n\n{OTHER_TOKEN}\n")
        await eventually(lambda: is_accepted(OTHER_TOKEN))
        assert await is_accepted(API_TOKEN)
        with structlog.testing.capture_logs() as logs:
            for seen, unusable in enumerate(("", "short", "\ntwo words, of which none is a token")):
                write(file, unusable)
                await eventually(lambda seen=seen: told(logs, seen))  # type: ignore[misc]
            os.unlink(file)
            await eventually(lambda: told(logs, 3))
        assert [entry["event"] for entry in logs] == ["access.files_unusable"] * 4
        assert all(str(file) in entry["reason"] for entry in logs)
        assert "short" not in repr(logs)
        assert await is_accepted(API_TOKEN)
        assert await is_accepted(OTHER_TOKEN)
        write(file, OTHER_TOKEN)
        await eventually(lambda: refused(is_accepted(API_TOKEN)))
        assert await is_accepted(OTHER_TOKEN)


async def told(logs: list[Any], seen: int) -> bool:
    return len(logs) > seen


async def refused(accepted: Awaitable[bool]) -> bool:
    return not await accepted


# TLS.


def credentials(authority: Authority, client: Pair | None = None) -> grpc.ChannelCredentials:
    return tls_credentials(authority.file, *((client.certificate, client.key) if client else ()))


async def answers(target: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Whether a new connection reaches a plane, which is asked for its health."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.secure_channel(target, credentials, options=options)
        if credentials
        else grpc.aio.insecure_channel(target, options=options)
    ) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


async def test_both_planes_speak_tls(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with running_server(server_config(**tls(authority.issue())), FakeBackend()) as running:
        for target in (address(running), admin_address(running)):
            assert await answers(target, credentials(authority))
            assert not await answers(target, credentials(stranger))
            assert not await answers(target, None)


async def test_tls_and_tokens_go_together(authority: Authority, tokens: dict[str, Any]) -> None:
    async with running_server(server_config(**tls(authority.issue()), **tokens), FakeBackend()) as running:
        for method in METHODS:
            async with grpc.aio.secure_channel(method.address(running), credentials(authority)) as channel:
                await method.call(channel, bearer(method.token))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method.call(channel, ())
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_clients_must_show_a_certificate_of_the_authority(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    config = server_config(**tls(authority.issue(), tls_client_ca_file=authority.file))
    async with running_server(config, FakeBackend()) as running:
        for target in (address(running), admin_address(running)):
            assert await answers(target, credentials(authority, authority.issue("client")))
            assert not await answers(target, credentials(authority, stranger.issue("other client")))
            assert not await answers(target, credentials(authority))


@pytest.mark.parametrize("has_general", [False, True])
async def test_administrators_may_have_an_authority_of_their_own(
    authority: Authority, tmp_path: Path, has_general: bool
) -> None:
    admins = Authority(tmp_path, "admins")
    general = {"tls_client_ca_file": authority.file} if has_general else {}
    config = server_config(**tls(authority.issue(), admin_tls_client_ca_file=admins.file, **general))
    async with running_server(config, FakeBackend()) as running:
        client = credentials(authority, authority.issue("client"))
        assert await answers(address(running), client)
        assert not await answers(admin_address(running), client)
        assert await answers(admin_address(running), credentials(authority, admins.issue("admin")))
        assert await answers(address(running), credentials(authority)) is not has_general


async def test_certificates_are_replaced_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    first, client = authority.issue(), authority.issue("client")
    config = server_config(**tls(first, tls_client_ca_file=authority.file))
    successor = Authority(tmp_path, "successor")
    second, new_client = successor.issue("second"), successor.issue("new client")
    async with (
        running_server(config, FakeBackend()) as running,
        grpc.aio.secure_channel(address(running), credentials(authority, client)) as old,
    ):
        await generate(old, ())
        with structlog.testing.capture_logs() as logs:
            write(first.certificate, second.certificate.read_text())  # without its key: not taken
            await eventually(lambda: told(logs, 1))  # by each plane
        assert {entry["event"] for entry in logs} == {"access.files_unusable"}
        assert "it is not the key of" in logs[0]["reason"]
        assert await answers(address(running), credentials(authority, client))
        write(first.key, second.key.read_text())
        for target in (address(running), admin_address(running)):
            new = credentials(successor, client)
            await eventually(lambda target=target, new=new: answers(target, new))  # type: ignore[misc]
            assert not await answers(target, credentials(authority, client))
        write(authority.file, successor.file.read_text())
        new = credentials(successor, new_client)
        await eventually(lambda: answers(address(running), new))
        assert not await answers(address(running), credentials(successor, client))
        await generate(old, ())  # a connection goes on


async def test_the_end_of_the_certificate_is_a_metric(authority: Authority) -> None:
    async with running_server(server_config(**tls(authority.issue())), FakeBackend()) as running:
        metrics = await scrape(running)
    name = "deltaplane_tls_certificate_expiry_timestamp_seconds "
    [line] = [line for line in metrics.splitlines() if line.startswith(name)]
    assert 29 < (float(line.split()[1]) - time.time()) / 86_400 < 31


# Clients.


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The folder of an adapter that can be uploaded."""
    folder = write_adapter(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def channels(tokens: dict[str, Any], authority: Authority) -> dict[str, Any]:
    encrypted = credentials(authority, authority.issue("client"))
    return {
        "channel": ChannelConfig(credentials=encrypted, token=API_TOKEN),
        "admin_channel": ChannelConfig(encrypted, token=token_from_file(tokens["admin_token_file"])),
    }


@pytest.fixture
def guarded(tokens: dict[str, Any], authority: Authority) -> Any:
    """Configuration of a server that wants all there is."""
    return server_config(**tls(authority.issue(), tls_client_ca_file=authority.file), **tokens)


async def test_the_asyncio_client(
    guarded: Any, channels: dict[str, Any], tokens: dict[str, Any], adapter: Path
) -> None:
    async with (
        running_server(guarded, FakeBackend()) as running,
        AsyncClient(address(running), admin_address(running), **channels) as client,
    ):
        assert await client.generate_text("hello", max_tokens=2)
        assert (await client.model()).name == "base"
        assert (await client.adapters.upload("a", adapter)).name == "a"
        async for event in client.adapters.watch():
            assert event.adapter.name == "a"
            break
        write(tokens["admin_token_file"], OTHER_TOKEN)

        async def is_accepted() -> bool:
            try:
                await client.adapters.slots()
            except errors.UnauthenticatedError:  # the server has not looked yet
                return False
            return True

        await eventually(is_accepted)


async def test_the_blocking_client(guarded: Any, channels: dict[str, Any], adapter: Path) -> None:
    def call() -> None:
        with Client(address(running), admin_address(running), **channels) as client:
            assert client.generate_text("hello", max_tokens=2)
            assert client.adapters.upload("a", adapter).name == "a"
            assert [found.name for found in client.adapters.list()] == ["a"]
            assert client.is_serving()
        with (
            Client(address(running), admin_address(running), channel=channels["channel"]) as client,
            pytest.raises(errors.UnauthenticatedError) as caught,
        ):
            client.adapters.upload("a", adapter)
        assert caught.value.reason == "TOKEN_NOT_ACCEPTED"

    async with running_server(guarded, FakeBackend()) as running:
        await asyncio.to_thread(call)


async def test_tokens_work_in_plain_text_too(tokens: dict[str, Any], adapter: Path) -> None:
    channel = ChannelConfig(token=API_TOKEN)
    async with (
        running_server(server_config(**tokens), FakeBackend()) as running,
        AsyncClient(address(running), admin_address(running), channel=channel) as client,
    ):
        assert await client.generate_text("hello", max_tokens=2)
        with pytest.raises(errors.UnauthenticatedError, match="not `Bearer` and a token"):
            await client.adapters.slots()
        for _ in range(20):
            with pytest.raises(errors.UnauthenticatedError, match="not `Bearer` and a token"):
                await client.adapters.upload("a", adapter)


async def test_deltactl(
    guarded: Any,
    tokens: dict[str, Any],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    adapter: Path,
    tmp_path: Path,
) -> None:
    pair = authority.issue("client")
    tls_options = ["--tls-ca-file", str(authority.file)]
    tls_options += ["--tls-cert-file", str(pair.certificate), "--tls-key-file", str(pair.key)]
    async with running_server(guarded, FakeBackend()) as running:
        monkeypatch.setenv("DELTAPLANE_ADDRESS", address(running))
        monkeypatch.setenv("DELTAPLANE_ADMIN_ADDRESS", admin_address(running))

        async def run(*words: str) -> int:
            return await asyncio.to_thread(deltactl, words)

        assert await run("health", *tls_options) == 0
        assert await run("slots", *tls_options) == 1
        assert "brings no token" in capsys.readouterr().err
        admin = ["--admin-token-file", str(tokens["admin_token_file"])]
        assert await run(*tls_options, "slots", *admin) == 0
        assert await run("model", *tls_options, "--token-file", str(tokens["api_token_file"])) == 0
        for variable, value in {
            "DELTAPLANE_TLS_CA_FILE": authority.file,
            "DELTAPLANE_TLS_CERT_FILE": pair.certificate,
            "DELTAPLANE_TLS_KEY_FILE": pair.key,
            "DELTAPLANE_TOKEN": API_TOKEN,
            "DELTAPLANE_ADMIN_TOKEN": ADMIN_TOKEN,
        }.items():
            monkeypatch.setenv(variable, str(value))
        assert await run("generate", "hello", "--max-tokens", "2") == 0
        assert await run("adapters", "upload", "a", str(adapter)) == 0
        assert await run("slots", "--token-file", str(tmp_path / "not needed")) == 0
        capsys.readouterr()
        assert await run("slots", "--admin-token-file", str(tmp_path / "none")) == 1
        assert "none cannot be read" in capsys.readouterr().err


async def test_deltactl_reaches_a_server_by_another_name_than_its_certificate_has(
    authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    config = server_config(**tls(authority.issue(host="deltaplane.example")))
    async with running_server(config, FakeBackend()) as running:
        words = ["model", "--address", address(running), "--tls-ca-file", str(authority.file)]
        assert await asyncio.to_thread(deltactl, words) == 1
        assert "no answer" in capsys.readouterr().err
        words += ["--tls-server-name", "deltaplane.example"]
        assert await asyncio.to_thread(deltactl, words) == 0
