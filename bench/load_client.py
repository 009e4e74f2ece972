"""One client process of the load generator: an event loop that sends requests and times what comes back."""

import asyncio
import math
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from bench.load import Burst, ClosedLoop, Job, Observations, Poisson, Request
from deltaplane.v1 import generation_pb2, generation_pb2_grpc

READY = "ready"
_PAUSE_AFTER_ERROR_S = 0.1


def run_client(pipe: Connection, address: str) -> None:
    """Does the jobs that come through the pipe until it is closed: for each, says READY, gets the time to
    start on the monotonic clock, and answers with Observations."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_do_jobs(pipe, address))


async def _do_jobs(pipe: Connection, address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while True:
            try:
                job: Job = pipe.recv()
            except EOFError:
                return
            client = _Client(stub, job)
            pipe.send(READY)
            pipe.send(await client.run(start=pipe.recv()))


class _Client:
    """Does one job."""

    def __init__(self, stub: Any, job: Job) -> None:
        self._stub = stub
        self._job = job
        self._requests = job.mix.requests(job.client, job.num_clients, job.seed)
        self._burst = (
            [next(self._requests) for _ in range(job.share)] if isinstance(job.arrivals, Burst) else []
        )
        self._begin, self._end = 0.0, math.inf
        self._seen = Observations()

    async def run(self, start: float) -> Observations:
        """start: when the first request is due, on the monotonic clock."""
        await asyncio.sleep(start - time.monotonic())
        cpu, wall = time.process_time(), time.monotonic()
        await self._arrive(start)
        self._seen.cpu_s = time.process_time() - cpu
        self._seen.wall_s = time.monotonic() - wall
        return self._seen

    async def _arrive(self, start: float) -> None:
        match self._job.arrivals:
            case Burst():
                self._begin = start
                await asyncio.gather(*(self._stream(request, start) for request in self._burst))
            case ClosedLoop(_, warmup_s, seconds):
                self._begin, self._end = start + warmup_s, start + warmup_s + seconds
                streams = (self._send_one_by_one(start) for _ in range(self._job.share))
                await self._until_end(asyncio.gather(*streams))
            case Poisson(rate, warmup_s, seconds):
                self._begin, self._end = start + warmup_s, start + warmup_s + seconds
                await self._until_end(self._send_when_due(start, rate / self._job.num_clients))

    async def _until_end(self, work: Any) -> None:
        """Breaks off what is not done when the window closes."""
        try:
            async with asyncio.timeout(self._end - time.monotonic()):
                await work
        except TimeoutError:
            pass

    async def _send_one_by_one(self, due: float) -> None:
        for request in self._requests:
            errors = self._seen.errors.total()
            await self._stream(request, due)
            if self._seen.errors.total() > errors:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
            due = time.monotonic()

    async def _send_when_due(self, start: float, rate: float) -> None:
        rng = random.Random(f"arrivals {self._job.seed} {self._job.client}")
        due = start
        async with asyncio.TaskGroup() as streams:
            for request in self._requests:
                due += rng.expovariate(rate)
                await asyncio.sleep(due - time.monotonic())
                streams.create_task(self._stream(request, due))

    async def _stream(self, request: Request, due: float) -> None:
        """Runs one stream to its end."""
        seen, begin, end = self._seen, self._begin, self._end
        sent = time.monotonic()
        made, previous = 0, 0.0
        try:
            async for message in self._stub.Generate(_message(request)):
                now = time.monotonic()
                tokens = len(message.token_ids)
                made += tokens
                if begin <= now < end:
                    seen.messages += 1
                    seen.tokens += tokens
                    seen.last = now
                    if previous:
                        seen.itl.append(now - previous)
                    else:
                        seen.ttft.append(now - due)
                        seen.late.append(sent - due)
                previous = now
        except grpc.aio.AioRpcError as error:
            seen.errors[error.code().name] += 1
            return
        if made != request.output:
            seen.errors["WRONG_LENGTH"] += 1
        elif begin <= time.monotonic() < end:
            seen.requests += 1


def _message(request: Request) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        adapter=request.adapter,
        token_ids=generation_pb2.TokenIds(ids=request.prompt),
        sampling=generation_pb2.SamplingParams(temperature=request.temperature),
        stop=generation_pb2.StopCondition(max_tokens=request.output, ignore_eos=True),
    )
