"""The stream behind WatchAdapters: adapters as they are, then every change."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from deltaplane_controlplane.events import AdapterEvent, EventType
from deltaplane_controlplane.filters import Filter, everything, parse_filter
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


@dataclass(frozen=True, slots=True)
class Change:
    """An event. left_filter: the adapter does not pass the watcher's filter any more."""

    event: AdapterEvent
    left_filter: bool


class FilterView:
    """Which adapters a watcher believes to pass its filter, so that it is told of each that stops to.

    is_resumed: what was told before is not known; the first that is heard of an adapter is then told, though
        it may never have passed.
    """

    def __init__(self, matches: Filter, *, is_resumed: bool) -> None:
        self._matches = matches
        self._is_resumed = is_resumed
        self._passes: dict[str, bool] = {}

    def show(self, adapter: AdapterView) -> None:
        """An adapter of the snapshot passes."""
        if self._matches is not everything:
            self._passes[adapter.name] = True

    def change(self, event: AdapterEvent) -> Change | None:
        """What to tell of an event; None for nothing."""
        if self._matches is everything:
            return Change(event, left_filter=False)
        name = event.adapter.name
        passes, passed = self._matches(event.adapter), self._passes.get(name, self._is_resumed)
        is_gone = event.type is EventType.DELETED and event.version == event.adapter.version
        if is_gone:
            self._passes.pop(name, None)
        else:
            self._passes[name] = passes
        return Change(event, left_filter=not passes) if passes or passed else None


async def watch(
    manager: AdapterManager, filter: str = "", resume_token: str = ""
) -> AsyncGenerator[SnapshotItem | SnapshotEnd | Change, None]:
    """All adapters that pass a filter, then every change of one that passes or did until then; with a token
    only what changed since. Never ends by itself; close it, so that another may watch in its place.

    A change that happens while the snapshot is sent follows it, though the snapshot may show it already.
    Errors: InvalidArgumentError (filter, token), OutOfRangeError (the token is too old),
    ResourceExhaustedError (the reader is too slow, or there are too many), UnavailableError (the server shuts
    down).
    """
    view = FilterView(parse_filter(filter), is_resumed=bool(resume_token))
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(news.set)

    with manager.subscribe(wake, resume_token) as subscription:
        if not resume_token:
            async for adapter in _snapshot(manager, filter):
                view.show(adapter)
                yield SnapshotItem(adapter)
            yield SnapshotEnd(subscription.resume_token)
        while True:
            news.clear()
            while events := subscription.read():
                for event in events:
                    if (change := view.change(event)) is not None:
                        yield change
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
