"""What happens to streams when adapters come, change and go, over the wire against a real server."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import field_mask_pb2

from deltaplane.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2_grpc
from e2e_reference import Reference
from e2e_streams import Answer, Ask, ask_all
from peft_factory import make_adapter, make_tiny_model
from serving import Served, served

PROMPT = list(b"A prompt of more than one page, so that its first pages can be found again.")
LONG = 400
SLOTS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lifecycle")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_tiny_model(folder, "qwen3")


@pytest.fixture(scope="module")
def trained(folder: Path, model: Path) -> dict[str, Path]:
    """Folders of four different adapters."""
    return {
        name: make_adapter(model, folder / name, rank=rank, seed=rank)
        for name, rank in {"one": 4, "two": 8, "three": 12, "four": 16}.items()
    }


@pytest.fixture(scope="module")
def reference(model: Path, trained: dict[str, Path]) -> Reference:
    return Reference(model, trained)


@pytest.fixture(params=["", "--enable-prefix-caching"])
def server(model: Path, folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with two slots, without adapters, from whose `folder` and `tmp_path` any may be registered."""
    flags = ["--max-loras", str(SLOTS), "--max-lora-rank", "16"]
    flags += ["--adapter-roots", str(folder), str(tmp_path), *request.param.split()]
    with served(model, tmp_path, *flags) as server:
        yield server
        assert server.metric("deltaplane_kv_pages_free") == server.metric("deltaplane_kv_pages_total")


class Admin:
    """The control plane, as far as these tests need it."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    async def register(self, name: str, source: Path) -> adapters_pb2.Adapter:
        return await self._call("RegisterAdapter", name=name, source=str(source))

    async def update(self, name: str, source: Path) -> adapters_pb2.Adapter:
        return await self._call(
            "UpdateAdapter",
            adapter=adapters_pb2.Adapter(name=name, source=str(source)),
            update_mask=field_mask_pb2.FieldMask(paths=["source"]),
        )

    async def get(self, name: str) -> adapters_pb2.Adapter:
        return await self._call("GetAdapter", name=name)

    async def load(self, name: str) -> adapters_pb2.Adapter:
        return await self._call("LoadAdapter", name=name)

    async def pin(self, name: str) -> adapters_pb2.Adapter:
        return await self._call("PinAdapter", name=name)

    async def evict(self, name: str) -> adapters_pb2.Adapter:
        return await self._call("EvictAdapter", name=name)

    async def delete(self, name: str) -> adapters_pb2.Adapter:
        return await self._call("DeleteAdapter", name=name)

    async def _call(self, method: str, **fields: Any) -> adapters_pb2.Adapter:
        request = getattr(adapters_pb2, f"{method}Request")(**fields)
        answer: adapters_pb2.Adapter = await getattr(self._stub, method)(request)
        return answer


@pytest.fixture
async def admin(server: Served) -> AsyncIterator[Admin]:
    async with grpc.aio.insecure_channel(server.admin_address) as channel:
        yield Admin(adapters_pb2_grpc.AdapterServiceStub(channel))


async def ask(server: Served, adapter: str, num_tokens: int = 12, top: int | None = None) -> Answer:
    [answer] = await ask_all(server.address, [Ask(adapter, PROMPT, num_tokens, top)])
    return answer


@dataclass
class Stream:
    """A stream under way and the tokens that it has brought so far."""

    call: Any
    messages: AsyncIterator[Any]
    tokens: list[int] = field(default_factory=list)

    async def first(self) -> None:
        self.tokens.extend((await anext(self.messages)).token_ids)

    async def rest(self) -> list[int]:
        async for message in self.messages:
            self.tokens.extend(message.token_ids)
        return self.tokens


@asynccontextmanager
async def running(server: Served, adapter: str) -> AsyncIterator[Stream]:
    """A long stream that has brought its first tokens."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            Ask(adapter, PROMPT, LONG).request()
        )
        stream = Stream(call, aiter(call))
        await stream.first()
        yield stream


async def no_leases(admin: Admin, name: str) -> None:
    """Returns when nothing holds the adapter any more."""
    async with asyncio.timeout(30):
        while (await admin.get(name)).leases:  # noqa: ASYNC110  # another process holds them
            await asyncio.sleep(0.01)


async def failure(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), caught.value.details() or ""


async def test_a_deleted_name_means_the_new_adapter_once_it_is_registered_again(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference
) -> None:
    await admin.register("tenant", trained["one"])
    first = await ask(server, "tenant")
    await admin.delete("tenant")
    again = await admin.register("tenant", trained["two"])
    second = await ask(server, "tenant")
    assert first.tokens == reference.greedy(PROMPT, "one", 12).tokens
    assert second.tokens == reference.greedy(PROMPT, "two", 12).tokens
    assert second.usage.adapter_version == again.version > first.usage.adapter_version
    assert second.usage.cached_tokens == 0


async def test_base_and_adapters_never_share_kv(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference
) -> None:
    for name in ("one", "two"):
        await admin.register(name, trained[name])
    for name in ("", "one", "two", "", "one", "two"):
        answer = await ask(server, name)
        assert answer.tokens == reference.greedy(PROMPT, name, 12).tokens, name


async def test_streams_end_on_the_version_they_began_with(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    source = shutil.copytree(trained["one"], tmp_path / "tenant")
    before = await admin.register("tenant", source)
    async with running(server, "tenant") as stream:
        shutil.copytree(trained["two"], source, dirs_exist_ok=True)
        after = await admin.update("tenant", source)
        assert after.version > before.version
        assert after.digest != before.digest
        new = await ask(server, "tenant")
        assert await stream.rest() == reference.greedy(PROMPT, "one", LONG).tokens
    assert new.tokens == reference.greedy(PROMPT, "two", 12).tokens
    assert new.usage.adapter_version == after.version
    assert not (await admin.get("tenant")).other_versions


async def test_fifty_first_requests_for_a_cold_adapter_are_one_load(
    server: Served, admin: Admin, trained: dict[str, Path]
) -> None:
    await admin.register("cold", trained["three"])
    answers = await ask_all(server.address, [Ask("cold", PROMPT, 4)] * 50)
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert (await admin.get("cold")).loads == 1
    assert server.metric("deltaplane_adapter_loads_total") == 1


async def test_loads_beside_a_stream_leave_every_bit_of_it_alone(
    server: Served, admin: Admin, trained: dict[str, Path]
) -> None:
    for name in trained:
        await admin.register(name, trained[name])
    await ask(server, "one")  # so that both find the same in the prefix cache, where there is one
    alone = await ask(server, "one", LONG, top=5)
    beside = asyncio.create_task(ask(server, "one", LONG, top=5))
    loads = 0
    while not beside.done():
        for name in ("two", "three", "four"):
            await admin.load(name)
            await admin.evict(name)
            loads += 1
    assert loads >= 3
    answer = await beside
    assert answer.tokens == alone.tokens
    assert answer.logprobs == alone.logprobs


async def test_an_adapter_whose_folder_is_gone_fails_alone_and_heals(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    source = shutil.copytree(trained["one"], tmp_path / "gone")
    await admin.register("gone", source)
    await admin.register("there", trained["two"])
    shutil.rmtree(source)
    code, details = await failure(ask(server, "gone"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "gone" in details
    failed = await admin.get("gone")
    assert failed.state == adapters_pb2.ADAPTER_STATE_FAILED
    assert failed.state_reason
    assert (await ask(server, "there")).tokens == reference.greedy(PROMPT, "two", 12).tokens
    shutil.copytree(trained["one"], source)
    await admin.register("gone", source)
    assert (await ask(server, "gone")).tokens == reference.greedy(PROMPT, "one", 12).tokens


async def test_a_broken_update_leaves_the_old_version_serving(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    await admin.register("tenant", trained["one"])
    await admin.load("tenant")
    broken = shutil.copytree(trained["two"], tmp_path / "broken")
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, details = await failure(admin.update("tenant", broken))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "adapter_model.safetensors" in details
    assert (await admin.get("tenant")).state == adapters_pb2.ADAPTER_STATE_RESIDENT
    assert (await ask(server, "tenant")).tokens == reference.greedy(PROMPT, "one", 12).tokens


async def test_a_cancelled_stream_gives_pages_and_lease_back(
    server: Served, admin: Admin, trained: dict[str, Path]
) -> None:
    await admin.register("tenant", trained["one"])
    async with running(server, "tenant") as stream:
        assert (await admin.get("tenant")).running == 1
        assert server.metric("deltaplane_kv_pages_free") < server.metric("deltaplane_kv_pages_total")
        stream.call.cancel()
        await no_leases(admin, "tenant")
    assert (await admin.get("tenant")).running == 0
    assert server.metric("deltaplane_kv_pages_free") == server.metric("deltaplane_kv_pages_total")
    assert (await admin.evict("tenant")).state == adapters_pb2.ADAPTER_STATE_HOST


async def test_a_passed_deadline_gives_pages_and_lease_back(
    server: Served, admin: Admin, trained: dict[str, Path]
) -> None:
    await admin.register("tenant", trained["one"])
    await admin.load("tenant")
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(Ask("tenant", PROMPT, LONG).request(), timeout=0.15)
        code, _ = await failure(Stream(call, aiter(call)).rest())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await no_leases(admin, "tenant")


async def test_every_adapter_gets_its_turn_though_others_want_the_slots(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference
) -> None:
    """Four adapters share two slots, and two of them have many requests waiting."""
    for name in trained:
        await admin.register(name, trained[name])
    names = ["one", "two"] * 12 + ["three", "four"] + ["one", "two"] * 4
    answers = await ask_all(server.address, [Ask(name, PROMPT, 24) for name in names])
    for name, answer in zip(names, answers, strict=True):
        assert answer.tokens == reference.greedy(PROMPT, name, 24).tokens, name


async def test_a_request_waits_while_all_slots_are_pinned_or_in_use(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference
) -> None:
    for name in ("one", "two", "three"):
        await admin.register(name, trained[name])
    await admin.pin("one")
    code, details = await failure(admin.pin("two"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "1 of 2 slots are pinned" in details
    async with running(server, "two") as stream, grpc.aio.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        hasty = stub.Generate(Ask("three", PROMPT, 12).request(), timeout=0.2)
        patient = asyncio.ensure_future(ask(server, "three"))
        code, _ = await failure(Stream(hasty, aiter(hasty)).rest())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await stream.rest() == reference.greedy(PROMPT, "two", LONG).tokens
    assert (await patient).tokens == reference.greedy(PROMPT, "three", 12).tokens
    await no_leases(admin, "three")
    assert (await admin.get("one")).evictions == 0


async def test_an_evicted_adapter_in_use_is_refused_and_streams_on(
    server: Served, admin: Admin, trained: dict[str, Path], reference: Reference
) -> None:
    await admin.register("tenant", trained["one"])
    async with running(server, "tenant") as stream:
        code, details = await failure(admin.evict("tenant"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "tenant" in details
        assert await stream.rest() == reference.greedy(PROMPT, "one", LONG).tokens
