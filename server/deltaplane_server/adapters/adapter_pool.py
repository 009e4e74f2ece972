"""The device's slots and rank pages, as the adapter manager and the runner use them."""

from collections.abc import Sequence

from deltaplane_controlplane.ports import HostAdapter
from deltaplane_kernels.lora import LoraStep, RankPagePool
from deltaplane_kernels.lora_segments import Segments
from deltaplane_server.adapters.packing import PackedAdapter


class AdapterPool:
    """A RankPagePool behind the manager's DevicePool port: it takes adapters that PeftLoader packed."""

    def __init__(self, pool: RankPagePool) -> None:
        self._pool = pool
        self.num_slots = pool.num_slots
        self.num_pages = pool.num_pages
        self.page_bytes = pool.page_bytes

    def copy_in(self, slot: int, pages: Sequence[int], adapter: HostAdapter) -> None:
        """Copies the adapter into `pages` and binds them to `slot`. Returns when a step may use the slot.

        Errors: TypeError where something else packed the adapter; ValueError where slot or pages are taken or
        do not fit. The slot and the pages are then free.
        """
        if not isinstance(adapter, PackedAdapter):
            raise TypeError(f"{type(adapter).__name__} is not a PackedAdapter")
        self._pool.load(slot, pages, adapter.pages, adapter.rows, adapter.side)

    def clear(self, slot: int) -> None:
        """Unbinds a slot that no step uses. Its pages are free afterwards."""
        self._pool.clear(slot)

    def step(self, segments: Segments) -> LoraStep | None:
        """The deltas of one step's rows; None where all are the base model's (see RankPagePool.step)."""
        return self._pool.step(segments)

    def graph_step(self, num_tokens: int) -> LoraStep:
        """The deltas of a step to capture in a CUDA graph (see RankPagePool.graph_step)."""
        return self._pool.graph_step(num_tokens)

    def check_integrity(self) -> None:
        """Asserts that slots and pages are in range and belong to one adapter each."""
        self._pool.check_integrity()
