"""What the adapter manager asks of the world below it. No tensor crosses here.

The server implements these over torch; tests implement them over nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

RANK_PAGE_ROWS = 8
"""Rank rows of every adapted matrix of every layer that one rank page holds."""


def rank_pages(rank: int) -> int:
    """Rank pages that an adapter of `rank` takes: ceil(rank / RANK_PAGE_ROWS)."""
    return -(-rank // RANK_PAGE_ROWS)


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """What a check of an adapter's files learned, without keeping a weight.

    rank: the highest rank of its modules, which decides its rank pages.
    rank_pattern: module kind ("q_proj") or path to rank, where it differs from `rank`.
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
    base_model: str = ""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)


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


class AdapterLoader(Protocol):
    """Reads adapters from their source. Called from any thread but the engine's."""

    def inspect(self, source: Path) -> AdapterManifest:
        """Checks config, names, shapes, dtypes, values and digest.

        Errors: InvalidArgumentError, which names what cannot be served exactly.
        """
        ...

    def pack(self, manifest: AdapterManifest) -> HostAdapter:
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
