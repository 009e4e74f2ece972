"""UploadAdapter over a real server: what arrives, what is refused, and that nothing else is left behind."""

import asyncio
import hashlib
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from control_plane import ControlPlane, eventually
from deltaplane import AsyncClient, Client, RetryPolicy, errors
from deltaplane.cli.main import main as deltactl
from deltaplane.v1 import adapters_pb2 as pb
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceStub, add_AdapterServiceServicer_to_server
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.interceptor import DETAILS_KEY, ErrorInterceptor
from deltaplane_controlplane.ports import NO_LINKS, AdapterManifest, Links, ServerFigures
from deltaplane_controlplane.service import AdapterServicer
from deltaplane_controlplane.uploads import CONFIG_FILE, WEIGHTS_FILE, UploadLimits, Uploads
from deltaplane_server.app import running_server
from fake_backend import FakeBackend, server_config
from fakes import write_adapter

LIMITS = UploadLimits(max_config_bytes=1000, max_weights_bytes=8 << 20, max_at_once=2)
WEIGHTS = bytes(range(256)) * 8


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


@dataclass(frozen=True)
class Serving:
    """A control plane that takes uploads into `folder`."""

    plane: ControlPlane
    folder: Path
    address: str
    stub: Any

    def left(self) -> set[str]:
        """What is in the folder."""
        return names_in(self.folder)

    def source(self, name: str) -> Path:
        return Path(self.plane.manager.get(name).manifest.source)

    async def eventually_left(self, *folders: Path) -> None:
        names = {folder.name for folder in folders}
        await asyncio.to_thread(eventually, lambda: self.left() == names, f"{names} alone in the folder")


@asynccontextmanager
async def serving(
    tmp_path: Path, limits: UploadLimits = LIMITS, *, catalogue: str | Path = ":memory:"
) -> AsyncIterator[Serving]:
    store = AdapterStore(tmp_path / "uploads")
    with ControlPlane(tmp_path, catalogue=catalogue, store=store) as plane:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
        servicer = AdapterServicer(
            plane.manager, lambda: ServerFigures(), Uploads(plane.manager, store, limits)
        )
        add_AdapterServiceServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield Serving(plane, store.path, address, AdapterServiceStub(channel))
        await server.stop(None)
        await asyncio.to_thread(servicer.close)
    store.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path) as served:
        yield served


@dataclass(frozen=True)
class Adapter:
    """The files of an adapter, made by `write_adapter`, and the messages that upload them."""

    config: bytes
    weights: bytes = WEIGHTS

    def files(self) -> list[pb.UploadFile]:
        return [
            pb.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in ((CONFIG_FILE, self.config), (WEIGHTS_FILE, self.weights))
        ]

    def header(self, name: str = "a", **fields: Any) -> pb.UploadAdapterRequest:
        return pb.UploadAdapterRequest(
            header=pb.UploadHeader(**{"name": name, "files": self.files(), **fields})
        )

    def chunks(self, num_bytes: int = 1 << 16) -> list[pb.UploadAdapterRequest]:
        data = self.config + self.weights
        return [chunk(data[at : at + num_bytes]) for at in range(0, len(data), num_bytes)]

    def messages(self, name: str = "a", **fields: Any) -> list[pb.UploadAdapterRequest]:
        return [self.header(name, **fields), *self.chunks()]


def chunk(data: bytes) -> pb.UploadAdapterRequest:
    return pb.UploadAdapterRequest(chunk=data)


def adapter(tmp_path: Path, content: str = "one", *, rank: int = 8) -> Adapter:
    folder = write_adapter(tmp_path / "made" / content, content=content, rank=rank)
    return Adapter((folder / CONFIG_FILE).read_bytes())


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    message: str
    reason: str
    fields: tuple[str, ...]


async def refusal(call: Any) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata() or ())[DETAILS_KEY])
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(request)
    fields = tuple(violation.field for violation in request.field_violations)
    return Refusal(caught.value.code(), status.message, info.reason, fields)


# What arrives.


@pytest.mark.parametrize("num_bytes", [1, 50, 1 << 20], ids=lambda value: f"chunks of {value}")
async def test_an_upload_is_an_adapter(tmp_path: Path, served: Serving, num_bytes: int) -> None:
    one = adapter(tmp_path)
    answer = await served.stub.UploadAdapter([one.header(labels={"team": "law"}), *one.chunks(num_bytes)])
    assert (answer.name, answer.version, dict(answer.labels)) == ("a", 1, {"team": "law"})
    source = Path(answer.source)
    assert served.left() == {source.name}
    assert (source / CONFIG_FILE).read_bytes() == one.config
    assert (source / WEIGHTS_FILE).read_bytes() == WEIGHTS
    slot = await asyncio.to_thread(served.plane.run, "a")
    assert served.plane.weights_in(slot) == answer.digest


async def test_the_files_come_in_the_order_of_the_header(tmp_path: Path, served: Serving) -> None:
    one = adapter(tmp_path)
    header = one.header(files=reversed(one.files()))
    answer = await served.stub.UploadAdapter([header, chunk(WEIGHTS + one.config)])
    assert (Path(answer.source) / CONFIG_FILE).read_bytes() == one.config


async def test_digests_may_be_in_capitals(tmp_path: Path, served: Serving) -> None:
    one = adapter(tmp_path)
    files = one.files()
    for file in files:
        file.sha256 = file.sha256.upper()
    assert (await served.stub.UploadAdapter([one.header(files=files), *one.chunks()])).version == 1


# What is refused, with nothing left behind.

BAD_HEADERS: dict[str, tuple[Callable[[Adapter], dict[str, Any]], str, str]] = {
    "name": (lambda a: {"name": "a/b"}, "header.name", "'a/b' is not 1 to 128 characters"),
    "label": (lambda a: {"labels": {"": "x"}}, "header.labels[]", "a key is 1 to 128 characters"),
    "no file": (lambda a: {"files": []}, "header.files", "each once; not none"),
    "one file": (lambda a: {"files": a.files()[:1]}, "header.files", f"{CONFIG_FILE} and {WEIGHTS_FILE}"),
    "twice": (
        lambda a: {"files": a.files()[:1] * 2},
        "header.files",
        f"not '{CONFIG_FILE}', '{CONFIG_FILE}'",
    ),
    "another": (
        lambda a: {"files": [*a.files(), pb.UploadFile(name="../x"), pb.UploadFile(name="y")]},
        "header.files",
        "'../x' and 1 more",
    ),
    "nothing in it": (
        lambda a: {"files": [pb.UploadFile(name=CONFIG_FILE, sha256="0" * 64), a.files()[1]]},
        "header.files[0].size_bytes",
        "0 bytes",
    ),
    "no digest": (
        lambda a: {"files": [a.files()[0], pb.UploadFile(name=WEIGHTS_FILE, size_bytes=1, sha256="xyz")]},
        "header.files[1].sha256",
        "'xyz' is not 64 hexadecimal digits",
    ),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
async def test_a_header_is_checked_before_bytes_come(tmp_path: Path, served: Serving, case: str) -> None:
    one = adapter(tmp_path)
    change, field, told = BAD_HEADERS[case]
    call = served.stub.UploadAdapter()
    await call.write(one.header(**change(one)))
    found = await refusal(call)
    assert (found.code, found.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))
    assert told in found.message
    assert served.left() == set()


async def test_all_that_is_wrong_with_the_files_is_told_at_once(tmp_path: Path, served: Serving) -> None:
    files = [pb.UploadFile(name=CONFIG_FILE, sha256="x"), pb.UploadFile(name=WEIGHTS_FILE, sha256="y")]
    found = await refusal(served.stub.UploadAdapter([adapter(tmp_path).header(files=files)]))
    assert found.fields == tuple(
        f"header.files[{number}].{field}" for number in (0, 1) for field in ("size_bytes", "sha256")
    )


@pytest.mark.parametrize(("number", "limit"), [(0, LIMITS.max_config_bytes), (1, LIMITS.max_weights_bytes)])
async def test_what_is_too_large_is_refused_before_bytes_come(
    tmp_path: Path, served: Serving, number: int, limit: int
) -> None:
    one = adapter(tmp_path)
    files = one.files()
    files[number].size_bytes = limit + 1
    call = served.stub.UploadAdapter()
    await call.write(one.header(files=files))
    found = await refusal(call)
    assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "UPLOAD_TOO_LARGE")
    assert f"has {limit + 1} bytes" in found.message
    assert f"at most {limit}" in found.message


BAD_STREAMS: dict[str, tuple[Callable[[Adapter], Sequence[pb.UploadAdapterRequest]], str, str]] = {
    "nothing": (lambda a: [], "header", "the stream ended before its first message"),
    "a chunk first": (lambda a: a.chunks(), "header", "not a chunk of {all} bytes"),
    "neither": (lambda a: [pb.UploadAdapterRequest()], "header", "not a chunk of 0 bytes"),
    "two headers": (lambda a: [*a.messages(), a.header()], "header", "it came twice"),
    "an empty chunk": (
        lambda a: [a.header(), chunk(a.config), chunk(b"")],
        "chunk",
        f"0 bytes came where {len(WEIGHTS)} are missing",
    ),
    "too much": (
        lambda a: [*a.messages(), chunk(b"more")],
        "chunk",
        "{more} bytes came, the header announced {all}",
    ),
    "too little": (
        lambda a: [a.header(), chunk(a.config)],
        "chunk",
        "ended after {config} bytes, the header announced {all}",
    ),
    "other weights": (
        lambda a: [a.header(), chunk(a.config), chunk(bytes(len(WEIGHTS)))],
        "header.files[1].sha256",
        "the bytes of adapter_model.safetensors have SHA-256",
    ),
    "another config": (
        lambda a: [a.header(), chunk(bytes(len(a.config) + len(WEIGHTS)))],
        "header.files[0].sha256",
        "the bytes of adapter_config.json have SHA-256",
    ),
}


@pytest.mark.parametrize("case", BAD_STREAMS)
async def test_a_stream_must_fit_its_header(tmp_path: Path, served: Serving, case: str) -> None:
    one = adapter(tmp_path)
    make, field, told = BAD_STREAMS[case]
    found = await refusal(served.stub.UploadAdapter(make(one)))
    assert (found.code, found.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))
    whole = len(one.config + WEIGHTS)
    assert told.format(all=whole, more=whole + 4, config=len(one.config)) in found.message
    await served.eventually_left()


async def test_a_name_in_use_is_refused_before_bytes_come(tmp_path: Path, served: Serving) -> None:
    one = adapter(tmp_path)
    await served.stub.UploadAdapter(one.messages())
    for again in (one, adapter(tmp_path, "two")):
        call = served.stub.UploadAdapter()
        await call.write(again.header())
        found = await refusal(call)
        assert (found.code, found.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_ALREADY_EXISTS")
    call = served.stub.UploadAdapter()
    await call.write(one.header("b", replace=True))
    assert (await refusal(call)).code is grpc.StatusCode.NOT_FOUND
    assert served.left() == {served.source("a").name}


@pytest.mark.parametrize("same", [True, False])
async def test_a_name_taken_meanwhile_ends_as_registering_it_does(
    tmp_path: Path, served: Serving, same: bool
) -> None:
    one, two = adapter(tmp_path), adapter(tmp_path, "two")
    slow = served.stub.UploadAdapter()
    await slow.write(one.header())
    await slow.write(chunk(one.config))
    quick = await served.stub.UploadAdapter((one if same else two).messages())
    await slow.write(chunk(WEIGHTS))
    await slow.done_writing()
    if same:
        assert (await slow).source == quick.source
    else:
        assert (await refusal(slow)).code is grpc.StatusCode.ALREADY_EXISTS
    await served.eventually_left(Path(quick.source))


async def test_files_that_cannot_be_served_are_not_kept(tmp_path: Path, served: Serving) -> None:
    found = await refusal(served.stub.UploadAdapter(adapter(tmp_path, rank=65).messages()))
    assert (found.code, found.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("header.files",))
    assert "rank 65 is over --max-lora-rank 64" in found.message
    assert served.left() == set()
    assert served.plane.manager.list_adapters().adapters == ()


async def test_a_cancelled_upload_leaves_nothing(tmp_path: Path, served: Serving) -> None:
    one = adapter(tmp_path)
    for _ in range(LIMITS.max_at_once + 1):
        call = served.stub.UploadAdapter()
        await call.write(one.header())
        await call.write(chunk(one.config))
        await asyncio.to_thread(eventually, lambda: len(served.left()) == 1, "the hidden folder")
        assert next(iter(served.left())).startswith(".upload-")
        call.cancel()
        await served.eventually_left()
    assert (await served.stub.UploadAdapter(one.messages())).version == 1


async def test_a_caller_who_leaves_at_the_end_does_not_stop_it(tmp_path: Path, served: Serving) -> None:
    reading, go_on = threading.Event(), threading.Event()
    inspect = served.plane.loader.inspect

    def slowly(source: Path, links: Links = NO_LINKS) -> AdapterManifest:
        reading.set()
        assert go_on.wait(30)
        return inspect(source, links)

    served.plane.loader.inspect = slowly  # type: ignore[method-assign]
    call = served.stub.UploadAdapter(adapter(tmp_path).messages())
    task = asyncio.ensure_future(call)
    assert await asyncio.to_thread(reading.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.to_thread(eventually, lambda: served.plane.manager.stats().registered == 1)
    assert served.left() == {served.source("a").name}


async def test_only_so_many_at_once(tmp_path: Path, served: Serving) -> None:
    one = adapter(tmp_path)
    calls = [served.stub.UploadAdapter() for _ in range(LIMITS.max_at_once)]
    for number, call in enumerate(calls):
        await call.write(one.header(f"a{number}"))
        await call.write(chunk(one.config))
    await asyncio.to_thread(eventually, lambda: len(served.left()) == len(calls))
    refused = served.stub.UploadAdapter()
    await refused.write(one.header("more"))
    found = await refusal(refused)
    assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_UPLOADS")
    assert "2 uploads are under way, at most 2" in found.message
    for call in calls:
        await call.write(chunk(WEIGHTS))
        await call.done_writing()
        await call
    assert (await served.stub.UploadAdapter(one.messages("more"))).name == "more"


@pytest.mark.parametrize("num_messages", [0, 1, 2])
async def test_a_client_that_stalls_is_cut_off(tmp_path: Path, num_messages: int) -> None:
    one = adapter(tmp_path)
    async with serving(tmp_path, UploadLimits(1000, 1 << 20, stall_timeout_s=0.1)) as served:
        call = served.stub.UploadAdapter()
        for message in [one.header(), chunk(one.config)][:num_messages]:
            await call.write(message)
        found = await refusal(call)
        assert (found.code, found.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "UPLOAD_STALLED")
        assert "the client sent nothing for 0.1 s" in found.message
        await served.eventually_left()


async def test_a_folder_that_is_gone_is_an_error_that_says_so(tmp_path: Path, served: Serving) -> None:
    served.folder.rename(tmp_path / "elsewhere")
    found = await refusal(served.stub.UploadAdapter(adapter(tmp_path).messages()))
    assert (found.code, found.reason) == (grpc.StatusCode.INTERNAL, "ADAPTER_STORE_WRITE_FAILED")
    assert str(served.folder) in found.message
    (tmp_path / "elsewhere").rename(served.folder)


async def test_a_server_that_stops_leaves_no_half_of_one(tmp_path: Path) -> None:
    one = adapter(tmp_path)
    async with serving(tmp_path) as served:
        call = served.stub.UploadAdapter()
        await call.write(one.header())
        await call.write(chunk(one.config))
        await asyncio.to_thread(eventually, lambda: len(served.left()) == 1)
    await served.eventually_left()


# What becomes of it.


async def test_replacing_makes_a_new_version_and_removes_the_old_one_when_it_has_drained(
    tmp_path: Path, served: Serving
) -> None:
    await served.stub.UploadAdapter(adapter(tmp_path).messages(labels={"team": "law"}))
    old = served.source("a")
    lease = served.plane.manager.lease("a")
    answer = await served.stub.UploadAdapter(adapter(tmp_path, "two").messages(replace=True))
    assert (answer.version, dict(answer.labels)) == (2, {"team": "law"})
    assert served.left() == {old.name, served.source("a").name}
    assert served.plane.weights_in(await asyncio.to_thread(served.plane.activate, lease)) != answer.digest
    lease.release()
    await served.eventually_left(served.source("a"))


async def test_replacing_by_the_same_files_is_the_same_version(tmp_path: Path, served: Serving) -> None:
    one = adapter(tmp_path)
    await served.stub.UploadAdapter(one.messages())
    again = await served.stub.UploadAdapter(one.messages(replace=True, labels={"team": "law"}))
    assert (again.version, dict(again.labels)) == (1, {"team": "law"})
    await served.eventually_left(Path(again.source))
    assert await asyncio.to_thread(served.plane.run, "a") == 0


async def test_replacing_can_keep_the_old_version_and_bring_the_new_one(
    tmp_path: Path, served: Serving
) -> None:
    first = await served.stub.UploadAdapter(adapter(tmp_path).messages())
    two = adapter(tmp_path, "two").messages(
        replace=True, keep_previous=True, etag=first.etag, load_tier=pb.ADAPTER_TIER_HOST
    )
    answer = await served.stub.UploadAdapter(two)
    assert (answer.version, [v.version for v in answer.other_versions]) == (2, [1])
    await asyncio.to_thread(eventually, lambda: served.plane.manager.get("a").tiers != ())
    assert served.left() == {Path(first.source).name, Path(answer.source).name}
    assert served.plane.manager.rollback("a").manifest.digest == first.digest


async def test_an_etag_that_does_not_match_is_told_before_bytes_come(tmp_path: Path, served: Serving) -> None:
    await served.stub.UploadAdapter(adapter(tmp_path).messages())
    call = served.stub.UploadAdapter()
    await call.write(adapter(tmp_path, "two").header(replace=True, etag="0"))
    found = await refusal(call)
    assert (found.code, found.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")


async def test_validating_checks_the_files_and_keeps_none(tmp_path: Path, served: Serving) -> None:
    answer = await served.stub.UploadAdapter(adapter(tmp_path).messages(validate_only=True))
    assert (answer.version, answer.rank) == (0, 8)
    found = await refusal(served.stub.UploadAdapter(adapter(tmp_path, rank=65).messages(validate_only=True)))
    assert found.fields == ("header.files",)
    await served.eventually_left()
    assert served.plane.manager.list_adapters().total_size == 0


async def test_a_repeated_upload_is_answered_before_its_bytes_come(tmp_path: Path, served: Serving) -> None:
    one, key = adapter(tmp_path), str(uuid.uuid4())
    first = await served.stub.UploadAdapter(one.messages(idempotency_key=key))
    call = served.stub.UploadAdapter()
    await call.write(one.header(idempotency_key=key))
    assert await call == first
    call = served.stub.UploadAdapter()
    await call.write(adapter(tmp_path, "two").header(idempotency_key=key))
    found = await refusal(call)
    assert found.fields == ("idempotency_key",)
    assert served.left() == {Path(first.source).name}


async def test_files_that_are_registered_from_elsewhere_leave_the_folder(
    tmp_path: Path, served: Serving
) -> None:
    await served.stub.UploadAdapter(adapter(tmp_path).messages())
    served.plane.manager.update("a", source=served.plane.folder("one"))
    assert served.plane.manager.get("a").version == 1
    await served.eventually_left()


async def test_an_upload_heals_what_failed(tmp_path: Path, served: Serving) -> None:
    one = adapter(tmp_path)
    await served.stub.UploadAdapter(one.messages())
    (served.source("a") / CONFIG_FILE).unlink()
    await refusal(served.stub.LoadAdapter(pb.LoadAdapterRequest(name="a")))
    assert (await served.stub.GetAdapter(pb.GetAdapterRequest(name="a"))).state == pb.ADAPTER_STATE_FAILED
    await served.stub.UploadAdapter(one.messages())
    assert await asyncio.to_thread(served.plane.run, "a") == 0
    await served.eventually_left(served.source("a"))


async def test_deleting_removes_the_files(tmp_path: Path, served: Serving) -> None:
    await served.stub.UploadAdapter(adapter(tmp_path).messages())
    await served.stub.UploadAdapter(adapter(tmp_path, "two").messages("b"))
    await served.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    await served.eventually_left(served.source("b"))


async def test_what_a_crash_left_is_removed_at_start(tmp_path: Path) -> None:
    catalogue = tmp_path / "catalogue.db"
    async with serving(tmp_path, catalogue=catalogue) as served:
        await served.stub.UploadAdapter(adapter(tmp_path).messages())
        await served.stub.UploadAdapter(adapter(tmp_path, "two").messages("b"))
        served.plane.manager.update("b", source=served.plane.folder("c"), keep_previous=True)
        known = served.left()
        for name in (".upload-" + "0" * 32, "upload-" + "1" * 32, "notes", "upload-mine"):
            (served.folder / name).mkdir()
            (served.folder / name / WEIGHTS_FILE).write_bytes(WEIGHTS)
    async with serving(tmp_path, catalogue=catalogue) as served:
        foreign = {"notes", "upload-mine"}
        await asyncio.to_thread(eventually, lambda: served.left() == known | foreign)
        assert len(known) == 2
        assert await asyncio.to_thread(served.plane.run, "a") == 0
        assert served.plane.manager.rollback("b").version == 1
        assert await asyncio.to_thread(served.plane.run, "b") == 1


async def test_the_folder_is_no_root_even_inside_of_one(tmp_path: Path) -> None:
    (tmp_path / "adapters").symlink_to(tmp_path, target_is_directory=True)
    async with serving(tmp_path) as served:
        await served.stub.UploadAdapter(adapter(tmp_path).messages())
        source = str(served.source("a"))
        assert Path(source).is_relative_to(served.plane.root.resolve())
        for call in (
            served.stub.RegisterAdapter(pb.RegisterAdapterRequest(name="b", source=source)),
            served.stub.UpdateAdapter(pb.UpdateAdapterRequest(adapter=pb.Adapter(name="a", source=source))),
        ):
            found = await refusal(call)
            assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "SOURCE_NOT_ALLOWED")
            assert "belongs to the adapter that it came for" in found.message


# Clients, and the whole server.

LARGE = bytes(1 << 20) * 3 + b"and a bit"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """An adapter on the client's machine, whose weights are some chunks long."""
    folder = write_adapter(tmp_path / "local", content="local")
    (folder / WEIGHTS_FILE).write_bytes(LARGE)
    return folder


async def test_the_blocking_client_uploads(served: Serving, local: Path) -> None:
    def run() -> Iterator[pb.Adapter]:
        with Client(served.address, served.address) as client:
            yield client.adapters.upload("a", local, labels={"team": "law"})
            with pytest.raises(errors.AlreadyExistsError):
                client.adapters.upload("a", str(local))
            write_adapter(local, content="changed")
            yield client.adapters.upload("a", local, replace=True)
            with pytest.raises(errors.InvalidArgumentError, match=r"nowhere/adapter_config\.json cannot be"):
                client.adapters.upload("b", local / "nowhere")

    first, second = await asyncio.to_thread(lambda: list(run()))
    assert (first.version, second.version, dict(second.labels)) == (1, 2, {"team": "law"})
    assert (served.source("a") / WEIGHTS_FILE).read_bytes() == LARGE


async def test_the_asyncio_client_uploads(served: Serving, local: Path) -> None:
    async with AsyncClient(served.address, served.address) as client:
        first = await client.adapters.upload("a", local, labels={"team": "law"})
        with pytest.raises(errors.AlreadyExistsError):
            await client.adapters.upload("a", str(local))
        write_adapter(local, content="changed")
        second = await client.adapters.upload("a", local, replace=True)
        with pytest.raises(errors.InvalidArgumentError, match=r"nowhere/adapter_config\.json cannot be read"):
            await client.adapters.upload("b", local / "nowhere")
    assert (first.version, second.version, dict(second.labels)) == (1, 2, {"team": "law"})
    assert (served.source("a") / WEIGHTS_FILE).read_bytes() == LARGE


async def test_a_client_comes_again_when_there_is_room(tmp_path: Path, local: Path) -> None:
    one = adapter(tmp_path)
    async with serving(tmp_path, UploadLimits(1000, 8 << 20, max_at_once=1)) as served:
        call = served.stub.UploadAdapter()
        await call.write(one.header("first"))
        await call.write(chunk(one.config))
        await asyncio.to_thread(eventually, lambda: len(served.left()) == 1)
        retry = RetryPolicy(max_attempts=1000, initial_backoff=0.01, max_backoff=0.01)
        async with AsyncClient(served.address, served.address, retry=retry) as client:
            upload = asyncio.create_task(client.adapters.upload("a", local))
            await asyncio.sleep(0.1)
            assert not upload.done()
            await call.write(chunk(WEIGHTS))
            await call.done_writing()
            assert (await call).name == "first"
            assert (await upload).name == "a"


async def test_deltactl_uploads(
    served: Serving, local: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DELTAPLANE_ADMIN_ADDRESS", served.address)
    words = ["adapters", "upload", "a", str(local)]
    assert await asyncio.to_thread(deltactl, [*words, "--label", "team=law"]) == 0
    assert "team=law" in capsys.readouterr().out
    assert await asyncio.to_thread(deltactl, words) == 1
    assert "adapter 'a' is registered (version 1" in capsys.readouterr().err
    write_adapter(local, content="changed")
    assert await asyncio.to_thread(deltactl, [*words, "--replace", "--validate-only"]) == 0
    assert served.plane.manager.get("a").version == 1
    assert await asyncio.to_thread(deltactl, [*words, "--replace", "--keep-previous", "--load", "host"]) == 0
    view = served.plane.manager.get("a")
    assert (view.version, len(view.other_versions)) == (2, 1)


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_server_generates_with_what_was_uploaded(tmp_path: Path, local: Path, keeps: bool) -> None:
    (local / WEIGHTS_FILE).write_bytes(WEIGHTS)
    state = str(tmp_path / "catalogue.sqlite3") if keeps else ":memory:"
    backend = FakeBackend()
    async with running_server(server_config(state=state), backend) as running:
        admin = f"127.0.0.1:{running.ports.admin_port}"
        async with AsyncClient(f"127.0.0.1:{running.ports.port}", admin) as client:
            uploaded = await client.adapters.upload("a", local)
            done = await client.complete("hello", adapter="a", max_tokens=5)
            assert done.usage is not None
            assert (done.usage.completion_tokens, done.usage.adapter) == (5, "a")
            [slot] = [slot for slot in await client.adapters.slots() if slot.adapter]
            assert (slot.adapter, slot.version) == ("a", 1)
            (local / WEIGHTS_FILE).write_bytes(bytes(6 << 20))
            with pytest.raises(
                errors.ResourceExhaustedError, match="has 6291456 bytes; one that can be served"
            ):
                await client.adapters.upload("b", local)
    folder, kept = Path(uploaded.source).parent, tmp_path / "catalogue.sqlite3.uploads"
    assert (folder == kept) == keeps
    assert names_in(folder) == ({Path(uploaded.source).name} if keeps else set())
