"""What the adapter manager tells of adapters, slots and tiers."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from deltaplane_controlplane.capacity import capacity_view
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.filters import PageToken, parse_filter
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.registry import Registry, not_found
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.versions import Adapter
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

_BATCH = 256


class Reports:
    """Pictures of the books, taken under the monitor. A long list is made in batches, so that the monitor is
    never held for long; each adapter in it is shown as it was at some moment of the call."""

    def __init__(
        self,
        monitor: Monitor,
        registry: Registry,
        residency: Residency,
        *,
        page_bytes: int,
        max_lora_rank: int,
    ) -> None:
        self._monitor = monitor
        self._registry = registry
        self._residency = residency
        self._page_bytes = page_bytes
        self._max_lora_rank = max_lora_rank

    def view(self, adapter: Adapter) -> AdapterView:
        """One adapter; the monitor is held."""
        position = self._residency.device.eviction_order().get(adapter.current)
        return adapter_view(adapter, self._page_bytes, position)

    def preview(self, name: str, manifest: AdapterManifest, labels: Mapping[str, str]) -> AdapterView:
        """An adapter that was checked and is not registered."""
        return preview(name, manifest, labels, self._page_bytes)

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
        page: list[AdapterView] = []
        total = 0
        more = False
        for name, view in self._matching(filter, lambda name: name > after and len(page) < size):
            total += 1
            if view is not None:
                page.append(view)
            else:
                more = more or name > after
        token = PageToken(page[-1].name, filter).encode() if more else ""
        return AdapterPage(tuple(page), token, total)

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
            )

    def _matching(
        self, filter: str, wants_view: Callable[[str], bool]
    ) -> Iterator[tuple[str, AdapterView | None]]:
        """Names that a filter lets through, in order, with views where they are wanted."""
        matches = parse_filter(filter)
        with self._monitor:
            names = self._registry.names
        for start in range(0, len(names), _BATCH):
            with self._monitor:
                found = (self._registry.find(name) for name in names[start : start + _BATCH])
                batch = [adapter for adapter in found if adapter is not None and matches(adapter)]
            for adapter in batch:
                yield adapter.name, self._locked_view(adapter) if wants_view(adapter.name) else None

    def _locked_view(self, adapter: Adapter) -> AdapterView:
        with self._monitor:
            return self.view(adapter)
