"""An adapter loader and a device pool over nothing, which check how the adapter manager uses them.

An adapter is a folder whose `adapter_config.json` says what the loader is to find in it; `write_adapter`
makes one.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltaplane_controlplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane_controlplane.ports import NO_LINKS, AdapterManifest, HostAdapter, Links, rank_pages

CONFIG = "adapter_config.json"


def write_adapter(
    folder: Path, *, rank: int = 8, nbytes: int = 100, content: str = "", features: Sequence[str] = ()
) -> Path:
    """Makes the folder of an adapter, or changes its files: `content` goes into the digest.

    features: each takes a page of the device beside those of the rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"rank": rank, "nbytes": nbytes, "content": content}
    (folder / CONFIG).write_text(json.dumps(config | {"features": list(features)} if features else config))
    return folder


@dataclass(frozen=True, slots=True)
class FakeHostAdapter:
    """Says which files it was packed from."""

    digest: str
    nbytes: int
    read_ms: float = 1.0
    pack_ms: float = 2.0


class FakeLoader:
    """Reads folders made by `write_adapter`.

    gate: packs wait while it is not set.
    packs: how often each digest was packed.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.inspections = 0
        self.packs: Counter[str] = Counter()
        self._lock = threading.Lock()

    def inspect(self, source: Path, links: Links = NO_LINKS) -> AdapterManifest:
        with self._lock:
            self.inspections += 1
        try:
            data = (source / CONFIG).read_bytes()
        except OSError as error:
            raise InvalidArgumentError.for_field("source", f"{source} has no {CONFIG}") from error
        config = json.loads(data)
        features = tuple(config.get("features", ()))
        return AdapterManifest(
            source=str(source),
            digest=hashlib.sha256(data).hexdigest(),
            rank=config["rank"],
            alpha=16.0,
            rslora=False,
            target_modules=("q_proj", "v_proj"),
            num_layers=2,
            source_bytes=len(data),
            host_bytes=config["nbytes"],
            num_pages=rank_pages(config["rank"]) + len(features),
            features=features,
        )

    def pack(self, manifest: AdapterManifest, links: Links = NO_LINKS) -> HostAdapter:
        with self._lock:
            self.packs[manifest.digest] += 1
        assert self.gate.wait(30), "nobody opened the gate"
        try:
            data = (Path(manifest.source) / CONFIG).read_bytes()
        except OSError as error:
            raise FailedPreconditionError(
                f"{manifest.source} is gone", reason="ADAPTER_FILES_GONE"
            ) from error
        digest = hashlib.sha256(data).hexdigest()
        if digest != manifest.digest:
            raise FailedPreconditionError(
                f"{manifest.source} has changed since it was registered", reason="ADAPTER_FILES_CHANGED"
            )
        return FakeHostAdapter(digest, manifest.host_bytes)


class FakePool:
    """Slots and rank pages that only remember what is in them.

    bound: what each slot holds, as (pages, adapter).
    gate: copies wait while it is not set.
    fail_copies: copies raise while it is true.
    """

    def __init__(self, num_slots: int = 2, num_pages: int = 8, page_bytes: int = 1000) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.bound: dict[int, tuple[tuple[int, ...], HostAdapter]] = {}
        self.copies = 0
        self.fail_copies = False
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def copy_in(self, slot: int, pages: Sequence[int], adapter: HostAdapter) -> None:
        assert self.gate.wait(30), "nobody opened the gate"
        with self._lock:
            taken = {page for other, _ in self.bound.values() for page in other}
            assert slot not in self.bound, f"slot {slot} is still bound"
            assert not taken.intersection(pages), f"pages {pages} are still bound"
            assert 0 <= slot < self.num_slots
            assert all(0 <= page < self.num_pages for page in pages)
            if self.fail_copies:
                raise RuntimeError("the device is broken")
            self.bound[slot] = (tuple(pages), adapter)
            self.copies += 1

    def clear(self, slot: int) -> None:
        with self._lock:
            del self.bound[slot]
