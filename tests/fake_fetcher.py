"""A fetcher of remote sources that reads no network."""

import threading
from pathlib import Path

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.ports import FetchedSource, Progress
from fakes import write_adapter

TOTAL_BYTES = 100


class FakeFetcher:
    """Fetches "fake://CONTENT": a folder below `root` with that content, resolved to revision 1.

    gate: fetches wait while it is not set, half-way, and look whether they are still wanted.
    fetches: how many began. abandoned: how many ended because nobody wanted them any more.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gate = threading.Event()
        self.gate.set()
        self.fetches = 0
        self.abandoned = 0
        self._lock = threading.Lock()

    def handles(self, source: str) -> bool:
        return source.startswith("fake://")

    def check(self, source: str) -> str:
        return source

    def is_from(self, known: str, source: str) -> bool:
        return known == f"{source}@1"

    def fetch(self, source: str, progress: Progress) -> FetchedSource:
        with self._lock:
            self.fetches += 1
            number = self.fetches
        content = source.removeprefix("fake://")
        if content == "missing":
            raise InvalidArgumentError.for_field("source", f"there is no {source}")
        progress.report("fetch", TOTAL_BYTES // 2, TOTAL_BYTES)
        try:
            while not self.gate.wait(0.005):
                progress.check()
        except BaseException:
            self.abandoned += 1
            raise
        folder = write_adapter(self.root / f"fetched-{number}", content=content)
        return FetchedSource(folder, f"{source}@1")
