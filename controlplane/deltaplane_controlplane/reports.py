"""What the adapter manager tells of adapters, slots and tiers."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from deltaplane_controlplane.capacity import capacity_view
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.filters import Filter, PageToken, everything, parse_filter
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.registry import Registry, not_found, unknown_files
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.versions import NO_LABELS, Adapter, AdapterState, Tier
from deltaplane_controlplane.views import (
    AdapterPage,
    AdapterStats,
    AdapterView,
    CapacityView,
    SlotView,
    adapter_view,
    preview,
    slot_view,
)

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_BATCH = 64


class Reports:
    """Pictures of the books, taken under the monitor. A long list is made in batches, so that the monitor is
    never held for long; each adapter in it is shown as it was at some moment of the call.

    operation_on: answers the newest operation under way on the adapter of a name, or an empty text.
    num_watches: answers how many are open.
    """

    def __init__(
        self,
        monitor: Monitor,
        registry: Registry,
        residency: Residency,
        *,
        operation_on: Callable[[str], str],
        num_watches: Callable[[], int],
        page_bytes: int,
        max_lora_rank: int,
    ) -> None:
        self._operation_on = operation_on
        self._num_watches = num_watches
        self._monitor = monitor
        self._registry = registry
        self._residency = residency
        self._page_bytes = page_bytes
        self._max_lora_rank = max_lora_rank

    def view(self, adapter: Adapter) -> AdapterView:
        """One adapter; the monitor is held."""
        return self._view(adapter, self._residency.device.eviction_position(adapter.current))

    def preview(self, name: str, manifest: AdapterManifest, labels: Mapping[str, str]) -> AdapterView:
        """An adapter that was checked and is not registered."""
        return preview(name, manifest, labels, self._page_bytes)

    def fetching(self, name: str, source: str) -> AdapterView:
        """An adapter whose files are on their way."""
        unknown = preview(name, unknown_files(source), NO_LABELS, self._page_bytes)
        return replace(unknown, state=AdapterState.FETCHING, state_reason="")

    def get(self, name: str) -> AdapterView:
        """One adapter, also while it drains. Errors: NotFoundError."""
        with self._monitor:
            adapter = self._registry.find(name)
            if adapter is None:
                raise not_found(name)
            return self.view(adapter)

    def list_adapters(self, page_size: int, page_token: str, filter: str) -> AdapterPage:
        """A page of adapters. Errors: InvalidArgumentError."""
        if page_size < 0:
            raise InvalidArgumentError.for_field("page_size", f"{page_size} is below 0; 0 takes the default")
        size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        after = PageToken.decode(page_token, filter).after
        matches = parse_filter(filter)
        names = self._names()
        begin = bisect_right(names, after)
        page = self._first(names[begin:], matches, size)
        end = bisect_right(names, page[-1].name) if len(page) == size else len(names)
        behind = self._count(names[end:], matches)
        token = PageToken(page[-1].name, filter).encode() if behind else ""
        return AdapterPage(tuple(page), token, self._count(names[:begin], matches) + len(page) + behind)

    def count_states(self) -> Mapping[AdapterState, int]:
        """How many adapters are in each state."""
        counts = Counter(dict.fromkeys(AdapterState, 0))
        for batch in _batches(self._names()):
            with self._monitor:
                counts.update(adapter.state for adapter in self._matching(batch, everything))
        return counts

    def slots(self) -> tuple[SlotView, ...]:
        """All slots, in order."""
        with self._monitor:
            device = self._residency.device
            order = device.eviction_order()
            return tuple(
                slot_view(slot, version, self._page_bytes, order.get(version) if version else None)
                for slot, version in enumerate(device.occupants)
            )

    def capacity(self, ranks: Sequence[int]) -> CapacityView:
        """What fits. Errors: InvalidArgumentError."""
        with self._monitor:
            return capacity_view(
                self._residency.host,
                self._residency.device,
                self._registry.pinned_in(Tier.DEVICE),
                page_bytes=self._page_bytes,
                max_lora_rank=self._max_lora_rank,
                ranks=ranks,
                registered=len(self._registry),
            )

    def stats(self) -> AdapterStats:
        """Totals for metrics."""
        with self._monitor:
            residency = self._residency
            return AdapterStats(
                registered=len(self._registry),
                resident=len(residency.device.order),
                host_bytes=residency.host.used_bytes,
                free_rank_pages=residency.device.pages.num_free,
                loads=residency.loads,
                load_failures=residency.load_failures,
                evictions=residency.evictions,
                hits=residency.hits,
                misses=residency.misses,
                running=tuple(sorted(residency.running)),
                waiting=tuple(sorted(residency.waiting)),
                watches=self._num_watches(),
            )

    def _view(self, adapter: Adapter, lru_position: int | None) -> AdapterView:
        return adapter_view(adapter, self._page_bytes, lru_position, self._operation_on(adapter.name))

    def _names(self) -> Sequence[str]:
        with self._monitor:
            return self._registry.names

    def _first(self, names: Sequence[str], matches: Filter, count: int) -> list[AdapterView]:
        """The first `count` of these adapters that a filter lets through."""
        views: list[AdapterView] = []
        for batch in _batches(names):
            with self._monitor:
                positions = self._residency.device.eviction_order()
                views += (
                    self._view(adapter, positions.get(adapter.current))
                    for adapter in islice(self._matching(batch, matches), count - len(views))
                )
            if len(views) == count:
                break
        return views

    def _count(self, names: Sequence[str], matches: Filter) -> int:
        """How many of these adapters a filter lets through."""
        if matches is everything:
            return len(names)
        count = 0
        for batch in _batches(names):
            with self._monitor:
                count += sum(1 for _ in self._matching(batch, matches))
        return count

    def _matching(self, names: Sequence[str], matches: Filter) -> Iterator[Adapter]:
        """Those that are still there and that a filter lets through; the monitor is held."""
        found = (self._registry.find(name) for name in names)
        return (adapter for adapter in found if adapter is not None and matches(adapter))


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + _BATCH] for start in range(0, len(names), _BATCH))
