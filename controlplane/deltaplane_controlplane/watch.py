"""The stream behind WatchAdapters: adapters as they are, then every change."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from deltaplane_controlplane.events import AdapterEvent
from deltaplane_controlplane.filters import parse_filter
from deltaplane_controlplane.manager import AdapterManager
from deltaplane_controlplane.views import AdapterView

_SNAPSHOT_PAGE = 256


@dataclass(frozen=True, slots=True)
class SnapshotItem:
    """An adapter as it is."""

    adapter: AdapterView


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """The snapshot is complete; changes follow from `resume_token` on."""

    resume_token: str


async def watch(
    manager: AdapterManager, filter: str = "", resume_token: str = ""
) -> AsyncIterator[SnapshotItem | SnapshotEnd | AdapterEvent]:
    """All adapters, then every change; with a token only what changed since. Never ends by itself.

    A change that happens while the snapshot is sent follows it, though the snapshot may show it already.
    Errors: InvalidArgumentError (filter, token), OutOfRangeError (the token is too old),
    ResourceExhaustedError (the reader is too slow), UnavailableError (the server shuts down).
    """
    matches = parse_filter(filter)
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(news.set)

    with manager.subscribe(wake, resume_token) as subscription:
        if not resume_token:
            async for adapter in _snapshot(manager, filter):
                yield SnapshotItem(adapter)
            yield SnapshotEnd(subscription.resume_token)
        while True:
            news.clear()
            while events := subscription.read():
                for event in events:
                    if matches(event.adapter):
                        yield event
            await news.wait()


async def _snapshot(manager: AdapterManager, filter: str) -> AsyncIterator[AdapterView]:
    token = ""
    while True:
        page = await asyncio.to_thread(
            manager.list_adapters, page_size=_SNAPSHOT_PAGE, page_token=token, filter=filter
        )
        for adapter in page.adapters:
            yield adapter
        token = page.next_page_token
        if not token:
            return
