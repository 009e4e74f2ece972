"""An adapter manager over fakes, for tests."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.leases import Lease, Slots
from deltaplane_controlplane.manager import AdapterManager, ManagerConfig
from deltaplane_controlplane.ports import SourceFetcher
from deltaplane_controlplane.views import AdapterView
from fake_fetcher import FakeFetcher
from fakes import FakeHostAdapter, FakeLoader, FakePool, write_adapter

PATIENCE_S = 30.0


def eventually(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.001)


class ControlPlane:
    """A manager, its fakes, and a folder for adapters. As a context manager it checks the books at its end.

    fetcher: brings remote adapters, unless it is made with another.
    ready: how often on_ready was called. expelled, gone: uids that on_expel and on_gone were called with.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_slots: int = 2,
        num_pages: int = 8,
        host_bytes: int = 1000,
        max_lora_rank: int = 64,
        loader_threads: int = 2,
        max_watches: int = 1024,
        catalogue: str | Path = ":memory:",
        store: AdapterStore | None = None,
        fetcher: SourceFetcher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = folder / "adapters"
        self.root.mkdir(exist_ok=True)
        self.loader = FakeLoader()
        self.fetcher = FakeFetcher(self.root)
        self.pool = FakePool(num_slots, num_pages)
        self.manager = AdapterManager(
            loader=self.loader,
            pool=self.pool,
            config=ManagerConfig(max_lora_rank, host_bytes, (self.root,), loader_threads, max_watches),
            catalogue=Catalogue(catalogue),
            store=store,
            fetcher=fetcher or self.fetcher,
            clock=clock,
        )
        self.ready = 0
        self.expelled: list[int] = []
        self.gone: list[int] = []
        self.manager.set_hooks(
            on_ready=self._on_ready, on_expel=self.expelled.append, on_gone=self.gone.append
        )
        self._woken = threading.Event()

    def folder(
        self,
        name: str,
        *,
        rank: int = 8,
        nbytes: int = 100,
        content: str | None = None,
        features: Sequence[str] = (),
    ) -> str:
        """The folder of an adapter; its files differ by name unless `content` says otherwise."""
        content = name if content is None else content
        folder = self.root / name
        return str(write_adapter(folder, rank=rank, nbytes=nbytes, content=content, features=features))

    def add(self, *names: str, rank: int = 8, nbytes: int = 100) -> AdapterView:
        """Registers adapters; answers the last one."""
        return [self.manager.register(n, self.folder(n, rank=rank, nbytes=nbytes)) for n in names][-1]

    def activate(self, lease: Lease) -> Slots:
        """Does what an engine does: asks, waits to be woken, asks again."""
        deadline = time.monotonic() + PATIENCE_S
        while (slot := lease.activate()) is None:
            self._woken.wait(0.05)
            self._woken.clear()
            assert time.monotonic() < deadline, f"{lease.adapter} did not become resident"
        return slot

    def run(self, name: str) -> Slots:
        """One request from beginning to end; answers the slot it had."""
        lease = self.manager.lease(name)
        slot = self.activate(lease)
        lease.release()
        return slot

    def weights_in(self, slot: Slots) -> str:
        """Digest of the files whose weights are in a slot."""
        assert isinstance(slot, int)
        adapter = self.pool.bound[slot][1]
        assert isinstance(adapter, FakeHostAdapter)
        return adapter.digest

    def weights_of(self, slots: Slots) -> Mapping[str, float]:
        """Digests of the files whose weights are in slots, and the factors of their deltas."""
        terms = ((slots, 1.0),) if isinstance(slots, int) else slots
        return {self.weights_in(slot): weight for slot, weight in terms}

    def digest(self, name: str) -> str:
        return self.manager.get(name).manifest.digest

    def resident(self) -> set[str]:
        return {slot.adapter for slot in self.manager.slots() if slot.adapter}

    def settle(self) -> None:
        """Waits until no load is under way and the pool has what the books say."""
        eventually(lambda: not self.manager.loading, "the end of all loads")
        eventually(lambda: set(self.pool.bound) == self._bound_slots(), "the clearing of slots")

    def close(self) -> None:
        self.fetcher.gate.set()
        self.loader.gate.set()
        self.pool.gate.set()
        self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.settle()
                self.manager.check_integrity()
        finally:
            self.close()

    def _on_ready(self) -> None:
        self.ready += 1
        self._woken.set()

    def _bound_slots(self) -> set[int]:
        return {slot.slot for slot in self.manager.slots() if slot.adapter}
