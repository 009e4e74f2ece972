"""Where a step's tokens stand in the KV pages, as the GPU kernels read it: one block of int32.

Block tables lie one after the other without padding (compressed rows, as in FlashInfer, Ye et al., 2025), so
one long sequence costs the short ones nothing, and a step's whole index crosses to the device in one copy out
of pinned memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 4
"""Sections start at multiples of 16 bytes: kernels are compiled for the alignment of their pointers."""

_PROGRAMS_PER_PROCESSOR = 4
_MIN_SPLITS, MAX_SPLITS = 4, 32


class Run(Protocol):
    """attention.TokenRun."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Splits:
    """How the keys of one decode are shared out.

    count: programs that may share them, at most MAX_SPLITS.
    min_keys: a program takes at least this many, while there are as many.
    fill_device: whether the decodes are so many that they occupy all processors unshared.
    """

    count: int
    min_keys: int
    fill_device: bool = True

    @classmethod
    def of(cls, num_programs: int, device: torch.device) -> "Splits":
        """num_programs: decodes times KV heads. Few of them share their keys to fill the device; many do so
        only where a sequence is so long that all others would wait for it."""
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = -(-_PROGRAMS_PER_PROCESSOR * processors // max(num_programs, 1))
        if num_programs * _PROGRAMS_PER_PROCESSOR < processors:
            min_keys = 64
        else:
            min_keys = 128 if num_programs < 2 * processors else 512
        count = min(max(wanted, _MIN_SPLITS), MAX_SPLITS)
        return cls(count, min_keys, fill_device=num_programs >= processors)


class DecodeWorkspace:
    """What the programs that share a decode hand to the last of them.

    counters: [decodes * Hkv], int32: programs that are done. Zero between launches; a launch leaves it so.
    """

    def __init__(self, counters: Tensor, num_splits: int) -> None:
        self.counters = counters
        self._num_splits = num_splits
        self._partials: tuple[Tensor, Tensor] | None = None

    def partials(self, group: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """float32, for each (decode, KV head, split, query head of the group): the weighted sum of values
        [rows, head_dim], and the peak and total of the weights [rows, 2]. Made at the first call and kept:
        all layers use the same."""
        if self._partials is None:
            rows = self.counters.shape[0] * self._num_splits * group
            self._partials = (
                self.counters.new_empty((rows, head_dim), dtype=torch.float32),
                self.counters.new_empty((rows, 2), dtype=torch.float32),
            )
        return self._partials


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """Of T tokens in S sequences: first those with one token, the decodes, then those with several.

    All tensors are int32, views of one block on the device:
    slots: [T], in the order of q's rows: page * page_size + place in the page of a token's key and value;
        -1 writes nothing.
    positions: [T], in the order of q's rows.
    rows: [S], the row of q of each sequence's first token.
    starts: [S], its position; -1 is a row of padding, whose output is zero.
    table_starts: [S], where a sequence's block table starts in tables.
    first_tokens: [S - num_decodes + 1], for each sequence with several tokens how many tokens such sequences
        have before it; then how many they have in all, num_prefill_tokens.
    tables: page numbers.
    """

    slots: Tensor
    positions: Tensor
    rows: Tensor
    starts: Tensor
    table_starts: Tensor
    first_tokens: Tensor
    tables: Tensor
    num_decodes: int
    num_prefill_tokens: int
    splits: Splits
    workspace: DecodeWorkspace

    @property
    def num_prefills(self) -> int:
        return self.first_tokens.shape[0] - 1


def build_index(
    runs: Sequence[Run], *, page_size: int, num_kv_heads: int, device: torch.device
) -> AttentionIndex:
    """The index of one step."""
    sections = _sections(runs, page_size, num_kv_heads)
    block = _to_pinned(sections, device).to(device, non_blocking=True)
    return _index(block, sections, num_kv_heads)


class DecodeIndexBuffer:
    """An index of one token each of `num_rows` sequences, in one place on the device, as a CUDA graph needs.

    max_pages: of one sequence.
    """

    def __init__(
        self, num_rows: int, max_pages: int, *, page_size: int, num_kv_heads: int, device: torch.device
    ) -> None:
        self._num_rows = num_rows
        self._page_size = page_size
        self._num_kv_heads = num_kv_heads
        empty = _sections([], page_size, num_kv_heads, num_rows)
        empty["tables"] = np.zeros(num_rows * max_pages, dtype=np.int32)
        self._block = _to_pinned(empty, device).to(device)
        self.index = _index(self._block, empty, num_kv_heads)

    def fill(self, runs: Sequence[Run]) -> None:
        """runs: at most num_rows, of one token each; rows after them are padding. Copies asynchronously."""
        pinned = _to_pinned(
            _sections(runs, self._page_size, self._num_kv_heads, self._num_rows), self._block.device
        )
        self._block[: pinned.shape[0]].copy_(pinned, non_blocking=True)


def _sections(
    runs: Sequence[Run], page_size: int, num_kv_heads: int, num_rows: int = 0
) -> dict[str, NDArray[np.int32]]:
    """The block's parts in order. Fewer than num_rows runs are followed by rows of padding."""
    padding = max(num_rows - len(runs), 0)
    counts = _int32([run.num_tokens for run in runs] + [1] * padding)
    starts = _int32([run.start for run in runs] + [-1] * padding)
    sizes = _int32([len(run.pages) for run in runs] + [0] * padding)
    tables = _int32([page for run in runs for page in run.pages])
    rows, table_starts = _before(counts), _before(sizes)

    run_of_token = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(run_of_token)) + (starts - rows)[run_of_token]
    slots = np.full(len(positions), -1)
    real = positions >= 0
    pages = tables[table_starts[run_of_token[real]] + positions[real] // page_size]
    slots[real] = pages * page_size + positions[real] % page_size

    order = np.argsort(counts > 1, kind="stable")
    prefills = counts[counts > 1]
    num_decodes = len(counts) - len(prefills)
    return {
        "slots": _int32(slots),
        "positions": _int32(np.maximum(positions, 0)),
        "rows": rows[order],
        "starts": starts[order],
        "table_starts": table_starts[order],
        "first_tokens": _int32([*_before(prefills), prefills.sum()]),
        "counters": np.zeros(num_decodes * num_kv_heads, dtype=np.int32),
        "tables": tables,
    }


def _index(block: Tensor, sections: dict[str, NDArray[np.int32]], num_kv_heads: int) -> AttentionIndex:
    """Views of the block that holds these sections."""
    views = {
        name: block[offset : offset + len(section)]
        for (name, section), offset in zip(sections.items(), _offsets(sections), strict=False)
    }
    counters = views.pop("counters")
    splits = Splits.of(counters.shape[0], block.device)
    return AttentionIndex(
        **views,
        num_decodes=counters.shape[0] // num_kv_heads,
        num_prefill_tokens=int(sections["first_tokens"][-1]),
        splits=splits,
        workspace=DecodeWorkspace(counters, splits.count),
    )


def _to_pinned(sections: dict[str, NDArray[np.int32]], device: torch.device) -> Tensor:
    """The block on the host. PyTorch keeps pinned memory from reuse until copies out of it are done."""
    offsets = _offsets(sections)
    block = torch.empty(offsets[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    target = block.numpy()
    for section, offset in zip(sections.values(), offsets, strict=False):
        target[offset : offset + len(section)] = section
    return block


def _offsets(sections: dict[str, NDArray[np.int32]]) -> list[int]:
    """Where each section starts, and where the last one ends."""
    offsets = [0]
    for section in sections.values():
        offsets.append(-(-(offsets[-1] + len(section)) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _before(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """For each entry, the sum of those before it."""
    return _int32(np.cumsum(counts) - counts)


def _int32(values: Sequence[int] | NDArray[np.generic]) -> NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)
