"""What the adapter manager asks of the world below it. No tensor crosses here.

The server implements these over torch; tests implement them over nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

RANK_PAGE_ROWS = 8
"""Rank rows of every adapted matrix of every layer that one rank page holds."""


MAX_VECTOR_ROWS = 2
"""Rows that an adapter may have beside those of its rank: the gains of DoRA, and biases."""


def rank_pages(num_rows: int) -> int:
    """Rank pages for matrices of so many rows: ceil(num_rows / RANK_PAGE_ROWS).

    Of an adapter that has nothing but LoRA in the layers, the rows are its rank. DoRA takes one more, and so
    do biases.
    """
    return -(-num_rows // RANK_PAGE_ROWS)


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """What a check of an adapter's files learned, without keeping a weight.

    source: where the files are from: their folder, or a remote address with the commit of its revision.
    folder: where files that were fetched are; empty where `source` is their folder.
    fetch_ms: how long fetching them took.
    rank: the highest rank of its modules.
    num_pages: pages that it takes on the device.
    rank_pattern: module kind ("q_proj") or path to rank, where it differs from `rank`.
    features: what it has beside LoRA in the layers, sorted: "bias", "dora", "embed_tokens", "lm_head",
        "trained_embeddings", "trained_norms".
    digest: SHA-256 of config and weights, in hexadecimal.
    num_layers: how many layers it changes.
    source_bytes / host_bytes: bytes of its files / of it packed in host memory.
    """

    source: str
    digest: str
    rank: int
    alpha: float
    rslora: bool
    target_modules: tuple[str, ...]
    num_layers: int
    source_bytes: int
    host_bytes: int
    num_pages: int
    base_model: str = ""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    folder: str = ""
    fetch_ms: float = 0.0

    @property
    def path(self) -> str:
        """The folder of the files."""
        return self.folder or self.source


class Progress(Protocol):
    """What somebody wants to know of work that takes its time. Called from the thread that does the work."""

    def report(self, stage: str, done: int, total: int | None) -> None:
        """How far a stage is, in bytes: `done` of `total`, None where nobody knows. Returns at once."""
        ...

    def check(self) -> None:
        """Errors: CancelledError, when nobody wants the work any more: clean up and let it pass."""
        ...


class _NoProgress:
    """Nobody asks, and nobody gives up."""

    def report(self, stage: str, done: int, total: int | None) -> None: ...

    def check(self) -> None: ...


NO_PROGRESS: Progress = _NoProgress()


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """Files that were fetched.

    folder: where they lie. source: where they are from, as resolved: with the commit of a revision.
    """

    folder: Path
    source: str


class SourceFetcher(Protocol):
    """Brings adapters from where they are remote to the store of the server. Called from any thread."""

    def handles(self, source: str) -> bool:
        """Whether this is a remote source, good or not, instead of the path of a folder."""
        ...

    def check(self, source: str) -> str:
        """A source as it may be shown to others. Errors: InvalidArgumentError (malformed, not allowed)."""
        ...

    def fetch(self, source: str, progress: Progress) -> FetchedSource:
        """Fetches the files into a folder of the store, which is the caller's then. Reports the stage
        "fetch", and checks the progress several times a second.

        Errors: InvalidArgumentError on "source" (no such source, not allowed, too large),
        FailedPreconditionError (this server is not set up for it), UnavailableError (it does not answer now),
        ResourceExhaustedError, CancelledError.
        """
        ...

    def is_from(self, known: str, source: str) -> bool:
        """Whether a resolved source may be what another source names now, told without a network."""
        ...


class HostAdapter(Protocol):
    """An adapter packed in host memory, ready to be copied to rank pages. Opaque to the manager.

    read_ms, pack_ms: how long its stages took.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def read_ms(self) -> float: ...
    @property
    def pack_ms(self) -> float: ...


Links = Mapping[str, Path]
"""Links of a folder: by name, the real path that each led to when it was trusted."""

NO_LINKS: Links = MappingProxyType({})


class AdapterLoader(Protocol):
    """Reads adapters from their source, through no link but those that it is given. Called from any thread
    but the engine's."""

    def inspect(self, source: Path, links: Links = NO_LINKS) -> AdapterManifest:
        """Checks config, names, shapes, dtypes, values and digest.

        Errors: InvalidArgumentError, which names what cannot be served exactly.
        """
        ...

    def pack(self, manifest: AdapterManifest, links: Links = NO_LINKS) -> HostAdapter:
        """Reads the files once, checks them again (they must still have the digest) and packs them.

        Errors: FailedPreconditionError (gone or changed), InvalidArgumentError (not servable).
        """
        ...


class DevicePool(Protocol):
    """The slots and rank pages of the device."""

    @property
    def num_slots(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...

    def copy_in(self, slot: int, pages: Sequence[int], adapter: HostAdapter) -> None:
        """Copies the adapter into `pages` and binds them to `slot`. Returns when a step may use the slot.

        Called for a slot and pages that no step uses. When it fails, the slot stays unbound. This and
        `clear` are called by one thread, which is not the engine's, one after the other.
        """
        ...

    def clear(self, slot: int) -> None:
        """Unbinds a slot that no step uses. Its pages are free afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What the server knows beside the adapters, for GetCapacity.

    kv_page_size: tokens of a KV page.
    memory: purpose ("weights", "kv_pages", "adapter_pages", "workspace", "host_cache") to bytes that it was
        given at start.
    """

    kv_pages: int = 0
    free_kv_pages: int = 0
    kv_page_size: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)


class ServerFiguresSource(Protocol):
    """Answers the figures as they are now, at once and from any thread."""

    def __call__(self) -> ServerFigures: ...
