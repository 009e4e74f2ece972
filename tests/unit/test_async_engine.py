"""The engine on an event loop: streams, consumers who are slow or leave, drain."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from deltaplane_controlplane.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from deltaplane_server.engine.api import Finish, FinishReason, GenerationRequest, OutputDelta, Usage
from deltaplane_server.engine.async_engine import AsyncEngine, OutputStream
from deltaplane_server.engine.engine import Engine
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from fake_leases import FakeAdapters
from fake_runner import Clock, FakeRunner, LetterDecoder, expected_tokens

PROMPT = [1, 2, 3]
CONFIG = SchedulerConfig(
    max_num_seqs=16,
    max_num_batched_tokens=64,
    max_model_len=2000,
    num_pages=1000,
    page_size=4,
    max_loras=2,
)


@dataclass
class World:
    """An engine on fakes, with its thread running."""

    engine: AsyncEngine
    runner: FakeRunner
    adapters: FakeAdapters

    async def is_idle(self) -> None:
        """Waits until nothing is in flight."""
        await until(lambda: (stats := self.engine.stats()).num_running + stats.num_waiting == 0)

    def check_unused(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.kv_pages_free == stats.kv_pages_total
        self.adapters.check_unused()


@dataclass
class Read:
    """All that a consumer read of one output."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    deltas: list[OutputDelta] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        self.tokens += delta.token_ids
        self.text += delta.text
        self.deltas.append(delta)

    @property
    def reason(self) -> FinishReason:
        finish = self.deltas[-1].finish
        assert finish is not None
        return finish.reason


@asynccontextmanager
async def running_world(
    *, slow_consumer_s: float = 30.0, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[World]:
    """Ends with the engine stopped and everything given back."""
    adapters = FakeAdapters(num_slots=2, load_ticks=0)
    runner = FakeRunner(CONFIG, adapters)
    engine = Engine(Scheduler(CONFIG), runner, LetterDecoder(), max_waiting=100)
    adapters.wake = engine.wake
    async_engine = AsyncEngine(engine, slow_consumer_s=slow_consumer_s, clock=clock)
    world = World(async_engine, runner, adapters)
    await world.engine.start()
    try:
        yield world
    finally:
        runner.gate.set()
        await world.engine.stop()
    world.check_unused()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_world() as running:
        yield running


async def until(condition: Callable[[], bool]) -> None:
    """Polls what has no event of its own."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def hold_up_the_loop_until_idle(world: World) -> None:
    """Meanwhile the engine goes on, and nothing it delivers is seen."""
    while world.engine.stats().num_running + world.engine.stats().num_waiting:
        time.sleep(0.001)


def request(request_id: str = "r", max_tokens: int = 5, **fields: Any) -> GenerationRequest:
    fields.setdefault("sampling", SamplingParams(temperature=0.0))
    return GenerationRequest(
        request_id=request_id, prompt_tokens=PROMPT, stop=StopParams(max_tokens=max_tokens), **fields
    )


async def read(stream: OutputStream, *, outputs: int = 1) -> Sequence[Read]:
    """Reads to the end."""
    reads = [Read() for _ in range(outputs)]
    last = None
    async for delta in stream:
        reads[delta.index].add(delta)
        last = delta
    assert last is not None
    assert last.usage is not None
    assert all(d is last or d.usage is None for r in reads for d in r.deltas)
    assert all(d is r.deltas[-1] or d.finish is None for r in reads for d in r.deltas)
    return reads


# Streams.


async def check_many_consumers(world: World) -> None:
    async def consume(number: int) -> None:
        uid = number % 4
        lease = world.adapters.lease(uid) if uid else None
        async with world.engine.generate(request(f"r{number}", 20 + number, lease=lease)) as stream:
            [output] = await read(stream)
        assert output.tokens == expected_tokens(uid, PROMPT, 20 + number)
        assert output.text == LetterDecoder().decode(output.tokens, skip_special_tokens=True)
        assert output.reason is FinishReason.LENGTH

    await asyncio.gather(*(consume(number) for number in range(40)))


async def test_many_consumers_at_once(world: World) -> None:
    await check_many_consumers(world)


def test_many_consumers_at_once_on_uvloop() -> None:
    async def main() -> None:
        async with running_world() as world:
            await check_many_consumers(world)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_stream_ends_after_its_last_delta(world: World) -> None:
    stream = world.engine.generate(request())
    await read(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_step_crosses_to_the_loop_in_one_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    calls = []
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
        calls.append(callback)
        return call_soon_threadsafe(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    streams = [world.engine.generate(request(f"r{number}", 20)) for number in range(16)]
    await asyncio.gather(*map(read, streams))
    assert len(calls) <= world.runner.num_steps < 16 * 20


async def test_what_is_not_read_yet_is_merged(world: World) -> None:
    """As many deltas as outputs, whatever their length."""
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    stream = world.engine.generate(request(max_tokens=300, num_outputs=3, sampling=sampling))
    await world.is_idle()
    await asyncio.sleep(0)
    reads = await read(stream, outputs=3)
    for output in reads:
        [delta] = output.deltas
        assert output.tokens == expected_tokens(0, PROMPT, 300)
        assert output.text == LetterDecoder().decode(output.tokens, skip_special_tokens=True)
        assert [entry.token_id for entry in delta.logprobs] == output.tokens
        assert delta.finish is not None


async def test_what_comes_while_the_loop_is_busy_wakes_each_reader_once(world: World) -> None:
    """So a loop that is behind has fewer deltas to send, and nobody gets his tokens at another's cost."""
    world.runner.gate.clear()
    readers = [
        asyncio.create_task(
            read(world.engine.generate(request(f"r{n}", 100 + n, lease=world.adapters.lease(1))))
        )
        for n in range(8)
    ]
    await until(lambda: world.runner.num_steps == 1)
    world.runner.gate.set()
    hold_up_the_loop_until_idle(world)
    for n, [output] in enumerate(await asyncio.gather(*readers)):
        assert output.tokens == expected_tokens(1, PROMPT, 100 + n)
        assert len(output.deltas) <= 2, "the last one may still have been on its way"


async def test_usage_comes_last_though_its_output_has_waited_longest_to_be_read(world: World) -> None:
    world.runner.gate.clear()
    finish = Finish(FinishReason.LENGTH)
    usage = Usage(3, 3, 0, 0.0, 0.0, 0.0, (), 0.0, 0)
    stream = world.engine.generate(request(num_outputs=2))
    stream.put(OutputDelta("r", 0, "a", (1,)))
    stream.put(OutputDelta("r", 1, "b", (2,), finish=finish))
    stream.put(OutputDelta("r", 0, "c", (3,), finish=finish, usage=usage))
    assert [delta async for delta in stream] == [
        OutputDelta("r", 1, "b", (2,), finish=finish),
        OutputDelta("r", 0, "ac", (1, 3), finish=finish, usage=usage),
    ]


# Refusals.


async def test_a_refusal_comes_before_the_stream(world: World) -> None:
    lease = world.adapters.lease(1)
    with pytest.raises(InvalidArgumentError):
        world.engine.generate(request(max_tokens=5000, lease=lease))
    assert not lease.is_released
    lease.release()


async def test_an_id_is_taken_until_its_last_delta_was_seen(world: World) -> None:
    world.runner.gate.clear()
    stream = world.engine.generate(request())
    with pytest.raises(AlreadyExistsError, match="'r' is in flight"):
        world.engine.generate(request())
    await stream.aclose()
    with pytest.raises(AlreadyExistsError, match="'r' is in flight"):
        world.engine.generate(request())
    world.runner.gate.set()
    await world.is_idle()
    await asyncio.sleep(0)
    [output] = await read(world.engine.generate(request()))
    assert output.tokens == expected_tokens(0, PROMPT, 5)


async def test_an_id_is_taken_while_its_last_delta_is_on_its_way(world: World) -> None:
    """The engine is done with it, and the event loop has not heard of that yet."""

    stream = world.engine.generate(request())
    hold_up_the_loop_until_idle(world)
    with pytest.raises(AlreadyExistsError, match="'r' is in flight"):
        world.engine.generate(request())
    [output] = await read(stream)
    assert output.tokens == expected_tokens(0, PROMPT, 5)


# Consumers who leave.


async def test_a_cancelled_consumer_aborts_its_request(world: World) -> None:
    world.runner.gate.clear()
    stream = world.engine.generate(request(max_tokens=1900, lease=world.adapters.lease(1)))
    reader = asyncio.create_task(read(stream))
    await until(lambda: world.runner.num_steps == 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    world.runner.gate.set()
    await world.is_idle()
    assert world.runner.num_steps <= 2, "it ends within one step"
    world.check_unused()


async def test_leaving_the_block_aborts_the_request(world: World) -> None:
    async with world.engine.generate(request(max_tokens=1900)) as stream:
        async for _ in stream:
            break
    await world.is_idle()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_a_stream_that_was_never_read(world: World) -> None:
    stream = world.engine.generate(request(max_tokens=1900, lease=world.adapters.lease(1)))
    await stream.aclose()
    await stream.aclose()
    await world.is_idle()
    world.check_unused()


async def test_a_timeout_of_one_read_ends_the_stream(world: World) -> None:
    world.runner.gate.clear()
    stream = world.engine.generate(request())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_consumer_who_does_not_read_is_aborted() -> None:
    async with running_world(slow_consumer_s=0.0) as world:
        with capture_logs() as logs:
            stream = world.engine.generate(request(max_tokens=1900))
            await world.is_idle()
            await asyncio.sleep(0)
        assert [(log["event"], log["request_id"]) for log in logs] == [("slow_consumer", "r")]
        [output] = await read(stream)
        assert output.reason is FinishReason.ABORTED
        assert output.tokens == expected_tokens(0, PROMPT, 1900)[: len(output.tokens)]


async def test_a_consumer_who_reads_now_and_then_is_not_aborted() -> None:
    """What counts is the time since the last read, or since there has been something to read."""
    clock = Clock()
    async with running_world(clock=clock) as world:
        world.runner.gate.clear()
        stream = world.engine.generate(request(num_outputs=2))
        clock.advance(100)
        with capture_logs() as logs:
            for index in (0, 1):
                stream.put(OutputDelta("r", index, "", (1,)))
            for _ in range(3):
                clock.advance(20)
                index = (await anext(stream)).index
                clock.advance(20)
                stream.put(OutputDelta("r", index, "", (1,)))
            assert not logs
            clock.advance(20)
            stream.put(OutputDelta("r", 0, "", (1,)))
        assert [log["event"] for log in logs] == ["slow_consumer"]


async def test_an_abort_ends_the_stream(world: World) -> None:
    stream = world.engine.generate(request(max_tokens=1900))
    first = await anext(stream)
    assert world.engine.abort("r")
    [output] = await read(stream)
    assert output.reason is FinishReason.ABORTED
    tokens = [*first.token_ids, *output.tokens]
    assert tokens == expected_tokens(0, PROMPT, len(tokens))
    assert not world.engine.abort("r")


# The end.


async def test_drain_lets_streams_end(world: World) -> None:
    stream = world.engine.generate(request(max_tokens=100))
    drained, [output] = await asyncio.gather(world.engine.drain(30), read(stream))
    assert drained
    assert output.reason is FinishReason.LENGTH
    with pytest.raises(UnavailableError):
        world.engine.generate(request())


async def test_drain_aborts_what_takes_too_long(world: World) -> None:
    world.runner.gate.clear()
    stream = world.engine.generate(request(max_tokens=1900))
    assert not await world.engine.drain(0.05)
    world.runner.gate.set()
    [output] = await read(stream)
    assert output.reason is FinishReason.ABORTED


def test_a_loop_that_is_gone_does_not_stop_the_engine() -> None:
    """Its consumers are gone with it."""
    runner = FakeRunner(CONFIG)
    engine = Engine(Scheduler(CONFIG), runner, LetterDecoder(), max_waiting=100)

    async def leave() -> None:
        async_engine = AsyncEngine(engine)
        await async_engine.start()
        runner.gate.clear()
        async_engine.generate(request())

    asyncio.run(leave())
    with capture_logs() as logs:
        runner.gate.set()
        assert engine.drain(30)
        engine.stop()
    assert {log["event"] for log in logs} == {"deltas_dropped"}
    assert not engine.is_alive
