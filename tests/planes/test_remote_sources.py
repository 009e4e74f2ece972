"""Adapters from remote sources over a real server: registering, updating, restarts, lost files, giving up."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from control_plane import ControlPlane, eventually
from deltaplane import Client
from deltaplane.cli.main import main as deltactl
from deltaplane.v1 import adapters_pb2 as pb
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceStub, add_AdapterServiceServicer_to_server
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.errors import FailedPreconditionError, UnavailableError
from deltaplane_controlplane.interceptor import DETAILS_KEY, ErrorInterceptor
from deltaplane_controlplane.ports import ServerFigures
from deltaplane_controlplane.service import AdapterServicer
from deltaplane_controlplane.uploads import CONFIG_FILE, WEIGHTS_FILE, UploadLimits, Uploads
from deltaplane_controlplane.versions import AdapterState, Tier
from deltaplane_server.adapters.remote.addresses import AllowedSources, parse_prefix
from deltaplane_server.adapters.remote.fetcher import FetchLimits, RemoteFetcher
from deltaplane_server.adapters.remote.host import FileBounds
from deltaplane_server.adapters.remote.retries import Retries
from deltaplane_server.app import RunningServer, running_server
from deltaplane_server.config import LoraModule
from deltaplane_server.startup import StartupError
from fake_backend import FakeBackend, server_config
from fake_hub import COMMIT, NEXT_COMMIT, FakeHub, fake_hub
from fakes import write_adapter
from http_host import HttpHost, drip, http_host, stall, status
from s3_host import s3_host

HUB_SOURCE = "hf://org/name"
RESOLVED, NEXT_RESOLVED = f"{HUB_SOURCE}@{COMMIT}", f"{HUB_SOURCE}@{NEXT_COMMIT}"
TRIES = 2


def files(tmp_path: Path, content: str = "one", *, rank: int = 8) -> dict[str, bytes]:
    """The files of an adapter that the fake loader reads."""
    folder = write_adapter(tmp_path / "made" / content, content=content, rank=rank)
    return {CONFIG_FILE: (folder / CONFIG_FILE).read_bytes(), WEIGHTS_FILE: content.encode() * 1000}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with one adapter."""
    with fake_hub(monkeypatch) as hub:
        hub.publish("org/name", files(tmp_path))
        yield hub


@pytest.fixture
def web(tmp_path: Path) -> Iterator[HttpHost]:
    """A web server with one adapter, /a/."""
    with http_host({f"/a/{name}": content for name, content in files(tmp_path).items()}) as web:
        yield web


@dataclass(frozen=True)
class Serving:
    """A control plane that fetches into a store."""

    plane: ControlPlane
    store: Path
    stub: Any

    async def register(self, name: str, source: str, **fields: Any) -> pb.Adapter:
        answer: pb.Adapter = await self.stub.RegisterAdapter(
            pb.RegisterAdapterRequest(name=name, source=source, **fields)
        )
        return answer

    async def update(self, name: str, source: str, **fields: Any) -> pb.Adapter:
        answer: pb.Adapter = await self.stub.UpdateAdapter(
            pb.UpdateAdapterRequest(adapter=pb.Adapter(name=name, source=source), **fields)
        )
        return answer

    def folder(self, name: str) -> Path:
        return Path(self.plane.manager.get(name).manifest.folder)

    async def run(self, name: str) -> str:
        """One request; answers the digest of the weights that it had."""
        return self.plane.weights_in(await asyncio.to_thread(self.plane.run, name))

    async def eventually_left(self, *folders: Path) -> None:
        names = {folder.name for folder in folders}

        def alone() -> bool:
            return {entry.name for entry in self.store.iterdir()} == names

        await asyncio.to_thread(eventually, alone, f"{names} alone in the store")


@asynccontextmanager
async def serving(
    tmp_path: Path, *prefixes: str, catalogue: str | Path = ":memory:"
) -> AsyncIterator[Serving]:
    store = AdapterStore(tmp_path / "store")
    fetcher = RemoteFetcher(
        store,
        AllowedSources(map(parse_prefix, prefixes or ("hf://org/",))),
        FileBounds(1000, 1 << 20),
        FetchLimits(retries=Retries(TRIES, backoff_s=0.0)),
    )
    with ControlPlane(tmp_path, catalogue=catalogue, store=store, fetcher=fetcher) as plane:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
        servicer = AdapterServicer(
            plane.manager, lambda: ServerFigures(), Uploads(plane.manager, store, UploadLimits(1000, 1000))
        )
        add_AdapterServiceServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield Serving(plane, store.path, AdapterServiceStub(channel))
        await server.stop(None)
        await asyncio.to_thread(servicer.close)
    fetcher.close()
    store.close()


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    message: str
    reason: str
    fields: tuple[str, ...]
    retry_s: int


async def refusal(call: Any) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    found = status_pb2.Status.FromString(dict(caught.value.trailing_metadata() or ())[DETAILS_KEY])
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in found.details:
        for kind in (info, request, retry):
            detail.Unpack(kind)
    fields = tuple(violation.field for violation in request.field_violations)
    return Refusal(caught.value.code(), found.message, info.reason, fields, retry.retry_delay.seconds)


# Registering and updating.


async def test_an_adapter_of_the_hub_is_registered_at_its_commit(tmp_path: Path, hub: FakeHub) -> None:
    async with serving(tmp_path) as served:
        answer = await served.register("a", f"{HUB_SOURCE}@main", labels={"team": "law"})
        assert (answer.name, answer.version, answer.source) == ("a", 1, RESOLVED)
        assert dict(answer.labels) == {"team": "law"}
        assert await served.run("a") == answer.digest
        await served.eventually_left(served.folder("a"))
        again = await served.register("a", HUB_SOURCE)
        assert (again.version, again.etag) == (1, answer.etag)
        await served.eventually_left(served.folder("a"))


async def test_an_adapter_of_a_web_server_is_registered(tmp_path: Path, web: HttpHost) -> None:
    async with serving(tmp_path, web.url) as served:
        answer = await served.register("a", f"{web.url}/a")
        assert answer.source == f"{web.url}/a/"
        assert await served.run("a") == answer.digest


async def test_an_adapter_of_a_bucket_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_host(monkeypatch) as s3:
        for name, content in files(tmp_path).items():
            s3.put("models", f"team/a/{name}", content)
        async with serving(tmp_path, "s3://models/team/") as served:
            answer = await served.register("a", "s3://models/team/a/")
            assert answer.source == "s3://models/team/a"
            assert await served.run("a") == answer.digest


async def test_a_branch_that_moved_is_a_new_version_and_one_that_did_not_is_none(
    tmp_path: Path, hub: FakeHub
) -> None:
    async with serving(tmp_path) as served:
        first = await served.register("a", HUB_SOURCE)
        same = await served.update("a", HUB_SOURCE)
        assert (same.version, same.digest, same.source) == (1, first.digest, RESOLVED)
        await served.eventually_left(served.folder("a"))
        hub.publish("org/name", files(tmp_path, "two"), NEXT_COMMIT)
        moved = await served.update("a", HUB_SOURCE)
        assert (moved.version, moved.source) == (2, NEXT_RESOLVED)
        assert await served.run("a") == moved.digest != first.digest
        await served.eventually_left(served.folder("a"))


async def test_a_commit_with_the_same_files_is_the_same_version_from_there_on(
    tmp_path: Path, hub: FakeHub
) -> None:
    async with serving(tmp_path) as served:
        await served.register("a", HUB_SOURCE)
        hub.publish("org/name", files(tmp_path), NEXT_COMMIT)
        answer = await served.update("a", HUB_SOURCE)
        assert (answer.version, answer.source) == (1, NEXT_RESOLVED)
        await served.eventually_left(served.folder("a"))


async def test_kept_versions_keep_their_files_and_deleted_adapters_do_not(
    tmp_path: Path, hub: FakeHub
) -> None:
    async with serving(tmp_path) as served:
        first = await served.register("a", HUB_SOURCE)
        kept = served.folder("a")
        hub.publish("org/name", files(tmp_path, "two"), NEXT_COMMIT)
        await served.update("a", HUB_SOURCE, keep_previous=True)
        await served.eventually_left(kept, served.folder("a"))
        back = await served.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="a"))
        assert (back.version, back.source, back.digest) == (1, RESOLVED, first.digest)
        assert await served.run("a") == first.digest
        await served.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
        await served.eventually_left()


async def test_adapters_of_one_source_do_not_share_their_fate(tmp_path: Path, hub: FakeHub) -> None:
    """They may have been fetched together, and each has its own files."""
    hub.store.fail(f"/blobs/org/name/resolve/{COMMIT}/{WEIGHTS_FILE}", stall(10))
    async with serving(tmp_path) as served:
        calls = [asyncio.create_task(served.register(name, HUB_SOURCE)) for name in "ab"]
        await asyncio.to_thread(hub.store.stalled.wait, 30)
        hub.store.released.set()
        await asyncio.gather(*calls)
        await served.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
        await served.eventually_left(served.folder("b"))
        assert await served.run("b") == served.plane.digest("b")


async def test_validating_leaves_nothing(tmp_path: Path, hub: FakeHub) -> None:
    async with serving(tmp_path) as served:
        answer = await served.register("a", HUB_SOURCE, validate_only=True)
        assert (answer.source, answer.rank) == (RESOLVED, 8)
        await served.eventually_left()
        await served.register("a", HUB_SOURCE)
        hub.publish("org/name", files(tmp_path, "two"), NEXT_COMMIT)
        assert (await served.update("a", HUB_SOURCE, validate_only=True)).source == NEXT_RESOLVED
        await served.eventually_left(served.folder("a"))


# What is refused, with nothing left behind.


async def test_a_digest_is_compared(tmp_path: Path, hub: FakeHub) -> None:
    async with serving(tmp_path) as served:
        found = await refusal(served.register("a", HUB_SOURCE, expected_digest="0" * 64))
        assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "DIGEST_MISMATCH")
        assert found.fields == ("expected_digest",)
        await served.eventually_left()
        digest = (await served.register("a", HUB_SOURCE, validate_only=True)).digest
        assert (await served.register("a", HUB_SOURCE, expected_digest=digest)).digest == digest


@pytest.mark.parametrize(
    ("source", "reason", "told"),
    [
        ("hf://other/name", "SOURCE_NOT_ALLOWED", "remote adapters come from hf://org"),
        ("hf://org", "INVALID_ARGUMENT", "name a repository as hf://org/name"),
        ("https://user:secret@host/a", "INVALID_ARGUMENT", "credentials do not belong into an address"),
        ("hf://org/none", "SOURCE_NOT_READABLE", "the hub has no such repository"),
        ("hf://org/name@v9", "SOURCE_NOT_READABLE", "no such revision"),
    ],
)
async def test_a_bad_source_is_an_error_of_its_field(
    tmp_path: Path, hub: FakeHub, source: str, reason: str, told: str
) -> None:
    async with serving(tmp_path) as served:
        await served.register("there", HUB_SOURCE)
        for call, field in (
            (served.register("a", source), "source"),
            (served.update("there", source), "adapter.source"),
        ):
            found = await refusal(call)
            assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
            assert found.fields == (field,)
            assert told in found.message
            assert "secret" not in found.message
        await served.eventually_left(served.folder("there"))


async def test_files_that_cannot_be_served_are_not_kept(tmp_path: Path, hub: FakeHub) -> None:
    hub.publish("org/name", files(tmp_path, "large", rank=65))
    async with serving(tmp_path) as served:
        found = await refusal(served.register("a", HUB_SOURCE))
        assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ADAPTER_TOO_LARGE")
        assert "rank 65 is over" in found.message
        await served.eventually_left()


async def test_other_files_under_a_name_in_use_are_not_kept(tmp_path: Path, hub: FakeHub) -> None:
    async with serving(tmp_path) as served:
        await served.register("a", HUB_SOURCE)
        hub.publish("org/name", files(tmp_path, "two"), NEXT_COMMIT)
        found = await refusal(served.register("a", HUB_SOURCE))
        assert found.code is grpc.StatusCode.ALREADY_EXISTS
        await served.eventually_left(served.folder("a"))


async def test_a_source_in_trouble_is_unavailable_with_a_time_to_come_back(
    tmp_path: Path, web: HttpHost
) -> None:
    web.fail(f"/a/{WEIGHTS_FILE}", *[status(503)] * TRIES)
    async with serving(tmp_path, web.url) as served:
        found = await refusal(served.register("a", f"{web.url}/a"))
        assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "SOURCE_UNAVAILABLE")
        assert found.retry_s > 0
        await served.eventually_left()
        assert (await served.register("a", f"{web.url}/a")).version == 1


@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_a_caller_who_gives_up_ends_the_fetch(tmp_path: Path, web: HttpHost, way: str) -> None:
    web.fail(f"/a/{WEIGHTS_FILE}", stall(10))
    async with serving(tmp_path, web.url) as served:
        request = pb.RegisterAdapterRequest(name="a", source=f"{web.url}/a")
        call = served.stub.RegisterAdapter(request, timeout=1.0 if way == "deadline" else None)
        await asyncio.to_thread(web.stalled.wait, 30)
        if way == "cancel":
            call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call
        await served.eventually_left()
        assert (await served.register("a", f"{web.url}/a")).version == 1


async def test_an_adapter_that_is_being_fetched_shows_so(tmp_path: Path, web: HttpHost) -> None:
    web.fail(f"/a/{WEIGHTS_FILE}", stall(10))
    async with serving(tmp_path, web.url) as served:
        answer = await served.register("a", f"{web.url}/a", return_immediately=True)
        assert answer.operation
        await asyncio.to_thread(web.stalled.wait, 30)
        shown = await served.stub.GetAdapter(pb.GetAdapterRequest(name="a"))
        assert (shown.state, shown.source) == (pb.ADAPTER_STATE_FETCHING, f"{web.url}/a/")
        operation = served.plane.manager.operations.get(answer.operation)
        await asyncio.to_thread(eventually, lambda: operation.view().stage == "fetch", "the stage")
        web.released.set()
        view = await asyncio.to_thread(operation.end.result, 30)
        assert (view.name, view.manifest.source) == ("a", f"{web.url}/a/")


async def test_what_is_wrong_with_an_address_is_told_before_it_is_shown_to_others(
    tmp_path: Path, web: HttpHost
) -> None:
    async with serving(tmp_path, web.url) as served:
        for source in ("https://user:secret@host/a", "hf://org/name"):
            found = await refusal(served.register("a", source, return_immediately=True))
            assert found.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await refusal(served.stub.GetAdapter(pb.GetAdapterRequest(name="a")))).code is (
            grpc.StatusCode.NOT_FOUND
        )


# Restarts, and files that are lost.


async def test_a_fetched_adapter_is_there_after_a_restart_without_its_source(
    tmp_path: Path, hub: FakeHub
) -> None:
    catalogue = tmp_path / "catalogue"
    async with serving(tmp_path, catalogue=catalogue) as served:
        digest = (await served.register("a", HUB_SOURCE)).digest
        folder = served.folder("a")
    (folder.parent / f".fetch-{'0' * 32}").mkdir()
    hub.host.files.clear()
    asked = len(hub.host.asked)
    async with serving(tmp_path, catalogue=catalogue) as served:
        assert await served.run("a") == digest
        assert (await served.stub.GetAdapter(pb.GetAdapterRequest(name="a"))).source == RESOLVED
        await served.eventually_left(folder)
        assert len(hub.host.asked) == asked


@pytest.mark.parametrize("lost", ["folder", "file", "bytes"])
async def test_lost_files_are_fetched_again_from_the_same_commit(
    tmp_path: Path, hub: FakeHub, lost: str
) -> None:
    catalogue = tmp_path / "catalogue"
    async with serving(tmp_path, catalogue=catalogue) as served:
        digest = (await served.register("a", HUB_SOURCE)).digest
        folder = served.folder("a")
    match lost:
        case "folder":
            shutil.rmtree(folder)
        case "file":
            (folder / CONFIG_FILE).unlink()
        case "bytes":
            (folder / CONFIG_FILE).write_bytes(b"{}")
    hub.publish("org/name", files(tmp_path, "two"), NEXT_COMMIT)
    async with serving(tmp_path, catalogue=catalogue) as served:
        assert await served.run("a") == digest
        assert served.folder("a") == folder
        assert {file.name for file in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
        await served.eventually_left(folder)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (
            "two",
            r"are lost here, and are others there by now \(SHA-256 [0-9a-f]{64}, not [0-9a-f]{64}\): update",
        ),
        ("", "does not exist: the server answers 404"),
    ],
)
async def test_lost_files_that_cannot_be_had_again_fail_the_adapter_until_it_is_updated(
    tmp_path: Path, web: HttpHost, now: str, told: str
) -> None:
    async with serving(tmp_path, web.url) as served:
        await served.register("a", f"{web.url}/a")
        shutil.rmtree(served.folder("a"))
        web.files = {f"/a/{name}": content for name, content in files(tmp_path, now).items()} if now else {}
        with pytest.raises(FailedPreconditionError, match=told):
            await asyncio.to_thread(served.plane.run, "a")
        shown = await served.stub.GetAdapter(pb.GetAdapterRequest(name="a"))
        assert shown.state == pb.ADAPTER_STATE_FAILED
        await served.eventually_left()
        web.files = {f"/a/{name}": content for name, content in files(tmp_path, "three").items()}
        healed = await served.update("a", f"{web.url}/a")
        assert await served.run("a") == healed.digest


async def test_files_that_are_fetched_again_delay_no_other_load(tmp_path: Path, web: HttpHost) -> None:
    lost = [f"lost-{number}" for number in range(3)]  # more than there are threads to read
    async with serving(tmp_path, web.url) as served:
        for name in lost:
            web.files |= {f"/{name}/{file}": content for file, content in files(tmp_path, name).items()}
            await served.register(name, f"{web.url}/{name}")
            shutil.rmtree(served.folder(name))
            web.fail(f"/{name}/{WEIGHTS_FILE}", stall(10))
        loads = [served.plane.manager.start_load(name, Tier.HOST) for name in lost]
        await asyncio.to_thread(web.stalled.wait, 30)
        served.plane.add("there")
        assert await served.run("there") == served.plane.digest("there")
        assert served.plane.manager.get(lost[0]).state is AdapterState.LOADING
        web.released.set()
        for load in loads:
            await asyncio.wrap_future(load)


async def test_a_server_that_stops_does_not_wait_for_a_source(tmp_path: Path, web: HttpHost) -> None:
    async with serving(tmp_path, web.url) as served:
        await served.register("a", f"{web.url}/a")
        shutil.rmtree(served.folder("a"))
        web.fail(f"/a/{WEIGHTS_FILE}", stall(10))
        load = served.plane.manager.start_load("a", Tier.HOST)
        await asyncio.to_thread(web.stalled.wait, 30)
        await asyncio.to_thread(served.plane.manager.close)
        with pytest.raises(UnavailableError, match="shutting down"):
            await asyncio.wrap_future(load)
        assert await asyncio.to_thread(web.left.wait, 30)


async def test_no_path_leads_into_the_store(tmp_path: Path, hub: FakeHub) -> None:
    async with serving(tmp_path) as served:
        await served.register("a", HUB_SOURCE)
        found = await refusal(served.register("b", str(served.folder("a"))))
        assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "SOURCE_NOT_ALLOWED")


# The whole server, its command line and its clients.


@asynccontextmanager
async def running(tmp_path: Path, **fields: Any) -> AsyncIterator[RunningServer]:
    config = server_config(state=str(tmp_path / "state"), **fields)
    async with running_server(config, FakeBackend()) as server:
        yield server


async def test_deltactl_and_clients_register_what_the_operator_allows(
    tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, adapter_sources=(parse_prefix("hf://org/"),)) as server:
        admin = f"127.0.0.1:{server.ports.admin_port}"
        words = ["--admin-address", admin, "adapters", "register", "a", f"{HUB_SOURCE}@main"]
        assert await asyncio.to_thread(deltactl, words) == 0, capsys.readouterr().err
        assert RESOLVED in capsys.readouterr().out

        def register() -> str:
            with Client(admin_address=admin) as client:
                return client.adapters.register("b", HUB_SOURCE).source

        assert await asyncio.to_thread(register) == RESOLVED


async def test_nothing_remote_is_allowed_by_default(
    tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path) as server:
        words = ["--admin-address", f"127.0.0.1:{server.ports.admin_port}", "adapters", "register", "a"]
        assert await asyncio.to_thread(deltactl, [*words, HUB_SOURCE]) == 1
        assert "start the server with --adapter-sources" in capsys.readouterr().err
    assert hub.host.paths() == []


async def test_adapters_of_the_command_line_may_be_remote(
    tmp_path: Path, hub: FakeHub, web: HttpHost
) -> None:
    """They are fetched anew at each start, and stay as they are where a source does not answer."""
    modules = (LoraModule("hub", HUB_SOURCE), LoraModule("web", f"{web.url}/a/"))
    async with running(tmp_path, lora_modules=modules) as server:
        views = {name: server.server.manager.get(name) for name in ("hub", "web")}
        assert [view.state.name for view in views.values()] == ["RESIDENT", "RESIDENT"]
        assert views["hub"].manifest.source == RESOLVED
    hub.publish("org/name", files(tmp_path, "two"), NEXT_COMMIT)
    web.check = lambda asked: status(403)
    with pytest.raises(StartupError, match=r"--lora-modules web=http://.*is refused with 403"):
        async with running(tmp_path, lora_modules=modules):
            pass
    async with running(tmp_path, lora_modules=modules[:1]) as server:
        view = server.server.manager.get("hub")
        assert (view.version, view.manifest.source) == (2, NEXT_RESOLVED)
        assert server.server.manager.get("web").version == 1


async def test_a_server_starts_without_the_sources_of_what_it_has(
    tmp_path: Path, web: HttpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retries, "_wait", lambda *_: 0.0)
    modules = (LoraModule("web", f"{web.url}/a/"),)
    async with running(tmp_path, lora_modules=modules) as server:
        digest = server.server.manager.get("web").manifest.digest
    web.check = lambda asked: status(503)
    async with running(tmp_path, lora_modules=modules) as server:
        view = server.server.manager.get("web")
        assert (view.state.name, view.manifest.digest) == ("RESIDENT", digest)
    with pytest.raises(StartupError, match="cannot be fetched now: it answers 503"):
        async with running(tmp_path, lora_modules=(LoraModule("web", f"{web.url}/other/"),)):
            pass


async def test_a_server_does_not_wait_for_a_source_that_takes_too_long(tmp_path: Path, web: HttpHost) -> None:
    modules = (LoraModule("web", f"{web.url}/a/"),)
    web.faults[f"/a/{WEIGHTS_FILE}"].append(drip(10))
    with pytest.raises(StartupError, match=r"cannot be fetched within 0\.5 s: .* raise --fetch-timeout"):
        async with running(tmp_path, lora_modules=modules, fetch_timeout_s=0.5):
            pass
    async with running(tmp_path, lora_modules=modules, fetch_timeout_s=3600) as server:
        assert server.server.manager.get("web").state.name == "RESIDENT"


async def test_a_missing_package_is_told_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(StartupError, match=r"pip install 'deltaplane\[s3\]'"):
        async with running(tmp_path, adapter_sources=(parse_prefix("s3://models/"),)):
            pass
