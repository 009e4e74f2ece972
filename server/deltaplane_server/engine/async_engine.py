"""The bridge from the engine's thread to an event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

import structlog

from deltaplane_controlplane.errors import AlreadyExistsError
from deltaplane_server.engine.api import EngineStats, GenerationRequest, OutputDelta
from deltaplane_server.engine.engine import Engine

log = structlog.get_logger(__name__)


class OutputStream(AsyncIterator[OutputDelta]):
    """The deltas of one request, for one consumer, who reads to the end or leaves early:

        async with engine.generate(request) as stream:
            async for delta in stream:
                ...

    A consumer who is behind, or whose event loop is, finds the deltas of each output merged into one: what is
    kept for him is bounded by the length of the outputs, and the further behind he is the less there is to do
    for a token. Leaving the block, aclose(), and cancelling a task that waits for a delta abort what is still
    in flight.
    """

    def __init__(
        self, engine: Engine, request_id: str, slow_consumer_s: float, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._request_id = request_id
        self._slow_consumer_s = slow_consumer_s
        self._unread: dict[int, list[OutputDelta]] = {}
        self._unread_since = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._is_complete = False
        self._is_aborted = False
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._unread:
            if self._is_complete or self._is_closed:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self._close()
                raise
        self._unread_since = self._clock()
        deltas = self._unread.pop(next(iter(self._unread)))
        return deltas[0] if len(deltas) == 1 else _merged(deltas)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    async def aclose(self) -> None:
        """Ends the stream, and the request where that is still in flight. Idempotent."""
        self._close()

    def put(self, delta: OutputDelta) -> None:
        """Takes in a delta; called on the event loop. The one with `usage` stays behind all others."""
        self._is_complete = delta.usage is not None
        self._wake_reader()
        if self._is_closed:
            return
        now = self._clock()
        if not self._unread:
            self._unread_since = now
        self._unread.setdefault(delta.index, []).append(delta)
        if self._is_complete:
            self._unread[delta.index] = self._unread.pop(delta.index)
        elif now - self._unread_since > self._slow_consumer_s and not self._is_aborted:
            log.warning("slow_consumer", request_id=self._request_id, seconds=self._slow_consumer_s)
            self._abort()

    def _close(self) -> None:
        self._is_closed = True
        self._unread.clear()
        self._wake_reader()
        self._abort()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _abort(self) -> None:
        if not self._is_complete and not self._is_aborted:
            self._is_aborted = True
            self._engine.abort(self._request_id)


def _merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Deltas of one output, in their order, as one."""
    last = deltas[-1]
    return OutputDelta(
        request_id=last.request_id,
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        finish=last.finish,
        usage=last.usage,
    )


class AsyncEngine:
    """The engine as the coroutines of one event loop see it.

    What a step makes crosses from the engine's thread in one call, however many streams it is for.
    """

    def __init__(
        self, engine: Engine, *, slow_consumer_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """slow_consumer_s: a request that goes on while its consumer reads nothing for so long is aborted.

        clock: seconds, never going back.
        """
        self._engine = engine
        self._clock = clock
        self._slow_consumer_s = slow_consumer_s
        self._streams: dict[str, OutputStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Starts the engine's thread, to deliver to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._deliver)

    def generate(self, request: GenerationRequest) -> OutputStream:
        """Submits a request at once, so that a refusal comes before anything is streamed.

        Errors: as Engine.submit(); the lease is then still the caller's.
        """
        request_id = request.request_id
        if request_id in self._streams:
            raise AlreadyExistsError(
                f"request_id: {request_id!r} is in flight; use another one, or none",
                reason="REQUEST_IN_FLIGHT",
            )
        self._engine.submit(request)
        stream = OutputStream(self._engine, request_id, self._slow_consumer_s, self._clock)
        self._streams[request_id] = stream
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request within one step; its stream ends with ABORTED. Says whether it was in flight."""
        return self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def drain(self, grace_s: float) -> bool:
        """As Engine.drain(), without holding the loop up."""
        return await asyncio.to_thread(self._engine.drain, grace_s)

    async def stop(self) -> None:
        """As Engine.stop(), without holding the loop up."""
        await asyncio.to_thread(self._engine.stop)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Called by the engine's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._dispatch, deltas)
        except RuntimeError:  # the loop is closed, and with it all consumers are gone
            log.warning("deltas_dropped", num_deltas=len(deltas))

    def _dispatch(self, deltas: list[OutputDelta]) -> None:
        """Called on the event loop. An id is free again only when the last delta under it was seen here."""
        for delta in deltas:
            stream = self._streams[delta.request_id]
            if delta.usage is not None:
                del self._streams[delta.request_id]
            stream.put(delta)
