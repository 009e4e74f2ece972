"""Two tenants share one process: from two cold adapters to a third that takes a slot, and back.

The story runs over the wire against a real server with two slots, in the order in which an operator would
see it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from deltaplane.errors import InvalidArgumentError, from_rpc
from deltaplane.v1 import adapters_pb2, adapters_pb2_grpc
from e2e_reference import Reference
from e2e_streams import Ask, ask_all
from peft_factory import make_adapter, make_tiny_model
from serving import Served, served

TENANT_A, TENANT_B, TENANT_C = "tenant-a", "tenant-b", "tenant-c"
PROMPT = list(b"Summarise the contract for me, please.")
OTHER_PROMPT = list(b"And now the second paragraph of it, if you would.")
PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worked-scenario")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_tiny_model(folder, "llama")


@pytest.fixture(scope="module")
def adapters(folder: Path, model: Path) -> dict[str, Path]:
    ranks = {TENANT_A: 8, TENANT_B: 16, TENANT_C: 4}
    return {
        name: make_adapter(model, folder / name, rank=rank, seed=seed)
        for seed, (name, rank) in enumerate(ranks.items(), start=1)
    }


@pytest.fixture(scope="module")
def reference(model: Path, adapters: dict[str, Path]) -> Reference:
    return Reference(model, adapters)


@pytest.fixture
def server(model: Path, folder: Path, tmp_path: Path) -> Iterator[Served]:
    flags = ("--max-loras", "2", "--max-lora-rank", "16", "--adapter-roots", str(folder))
    with served(model, tmp_path, *flags) as server:
        yield server


@asynccontextmanager
async def control(server: Served) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.admin_address) as channel:
        yield adapters_pb2_grpc.AdapterServiceStub(channel)


async def slots(admin: Any) -> dict[str, int]:
    listed = await admin.ListSlots(adapters_pb2.ListSlotsRequest())
    assert [slot.slot for slot in listed.slots] == [0, 1]
    return {slot.adapter: slot.slot for slot in listed.slots if slot.adapter}


async def adapter(admin: Any, name: str) -> adapters_pb2.Adapter:
    found: adapters_pb2.Adapter = await admin.GetAdapter(adapters_pb2.GetAdapterRequest(name=name))
    return found


async def register(admin: Any, name: str, source: Path) -> adapters_pb2.Adapter:
    request = adapters_pb2.RegisterAdapterRequest(name=name, source=str(source))
    registered: adapters_pb2.Adapter = await admin.RegisterAdapter(request)
    return registered


async def test_two_tenants_and_a_third(
    server: Served, adapters: dict[str, Path], reference: Reference
) -> None:
    async with control(server) as admin:
        for name, source in adapters.items():
            known = await register(admin, name, source)
            assert known.state == adapters_pb2.ADAPTER_STATE_REGISTERED
        assert await slots(admin) == {}
        assert server.metric("deltaplane_kv_pages_free") == server.metric("deltaplane_kv_pages_total")

        # Two tenants at once, both cold: both adapters are loaded and at least one step serves both.
        asks = [Ask(TENANT_A, PROMPT, 120), Ask(TENANT_B, PROMPT, 120)]
        running = asyncio.create_task(ask_all(server.address, asks))
        pages_at_once = await most_pages_in_use(server, running)
        a, b = await running
        for ask, answer in zip(asks, (a, b), strict=True):
            assert answer.tokens == reference.greedy(PROMPT, ask.adapter, ask.num_tokens).tokens
            assert not answer.usage.adapter_hit
            assert answer.usage.adapter_load_ms > 0
        assert set(await slots(admin)) == {TENANT_A, TENANT_B}
        assert steps_with_both(server) > 0

        # KV pages are each request's own, though the prompts are equal, and free again at the end.
        of_one = -(-len(PROMPT) // PAGE)
        assert pages_at_once >= 2 * of_one
        assert server.metric("deltaplane_kv_pages_free") == server.metric("deltaplane_kv_pages_total")

        # The second request of tenant A finds the weights resident and takes pages of its own.
        [again] = await ask_all(server.address, [Ask(TENANT_A, OTHER_PROMPT, 8)])
        assert again.tokens == reference.greedy(OTHER_PROMPT, TENANT_A, 8).tokens
        assert again.usage.adapter_hit
        assert again.usage.cached_tokens == 0
        assert (await adapter(admin, TENANT_A)).loads == 1

        # Tenant C needs a slot: B, the least recently used, goes.
        [c] = await ask_all(server.address, [Ask(TENANT_C, PROMPT, 8)])
        assert c.tokens == reference.greedy(PROMPT, TENANT_C, 8).tokens
        assert set(await slots(admin)) == {TENANT_A, TENANT_C}
        evicted = await adapter(admin, TENANT_B)
        assert evicted.state == adapters_pb2.ADAPTER_STATE_HOST
        assert evicted.evictions == 1

        # The next request of tenant B brings it back, with the same answer as before.
        [back] = await ask_all(server.address, [Ask(TENANT_B, PROMPT, 120)])
        assert back.tokens == b.tokens
        assert not back.usage.adapter_hit
        assert set(await slots(admin)) == {TENANT_B, TENANT_C}
        assert (await adapter(admin, TENANT_B)).loads == 2


async def most_pages_in_use(server: Served, running: "asyncio.Task[Any]") -> float:
    """The most KV pages that were in use at any look while `running` ran."""
    total, most = server.metric("deltaplane_kv_pages_total"), 0.0
    while not running.done():
        free = await asyncio.to_thread(server.metric, "deltaplane_kv_pages_free")
        most = max(most, total - free)
    return most


def steps_with_both(server: Served) -> float:
    upto = {
        bound: server.metric("deltaplane_step_adapters_bucket", le=bound) for bound in ("1.0", "2.0", "+Inf")
    }
    assert upto["+Inf"] == upto["2.0"], "a step had more adapters than there are slots"
    return upto["2.0"] - upto["1.0"]


async def test_a_rank_above_the_limit_is_refused_with_both_numbers(
    server: Served, model: Path, folder: Path
) -> None:
    source = make_adapter(model, folder / "rank-32", rank=32)
    async with control(server) as admin:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await register(admin, "too-high", source)
        error = from_rpc(caught.value, server.admin_address)
        assert isinstance(error, InvalidArgumentError)
        [violation] = error.violations
        assert "32" in violation.description
        assert "16" in violation.description
        listed = await admin.ListAdapters(adapters_pb2.ListAdaptersRequest())
        assert listed.total_size == 0


async def test_an_unknown_adapter_is_an_error_and_never_the_base(server: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask_all(server.address, [Ask("nobody", PROMPT, 4)])
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "nobody" in (caught.value.details() or "")
