"""The thread on which fetches run: an event loop with an HTTP client, so that each can be cancelled."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

import httpx2

from deltaplane_server.version import VERSION

_T = TypeVar("_T")


class Network:
    """An HTTP client on a thread of its own. Proxies and trusted authorities are those of the environment.

    connect_timeout_s: for a connection. stall_timeout_s: how long a server may send nothing.
    """

    def __init__(self, connect_timeout_s: float, stall_timeout_s: float) -> None:
        """Returns when the client is there."""
        self._timeout = httpx2.Timeout(stall_timeout_s, connect=connect_timeout_s, pool=None)
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="adapter-network", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def start(self, call: Callable[[httpx2.AsyncClient], Coroutine[None, None, _T]]) -> Future[_T]:
        """Begins a call on the thread. Cancelling the answer cancels the call."""
        return asyncio.run_coroutine_threadsafe(call(self._client), self._loop)

    def close(self) -> None:
        """Cancels what runs and waits for its end."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        limits = httpx2.Limits(max_connections=None)
        headers = {"User-Agent": f"deltaplane/{VERSION}"}
        async with httpx2.AsyncClient(timeout=self._timeout, limits=limits, headers=headers) as self._client:
            self._ready.set()
            await self._stop.wait()
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
