"""Where a step's tokens stand in the KV pages, as the GPU kernels read it: one block of int32.

Block tables lie one after the other without padding (compressed rows, as in FlashInfer, Ye et al., 2025), so
one long sequence costs the short ones nothing, and a step's whole index crosses to the device in one copy out
of pinned memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 4
"""Sections start at multiples of 16 bytes: kernels are compiled for the alignment of their pointers."""

_PROGRAMS_PER_PROCESSOR = 4
MIN_SPLITS, MAX_SPLITS = 4, 32

Sections = dict[str, NDArray[np.int32]]


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
    fill_device: bool

    @classmethod
    def of(cls, num_programs: int, device: torch.device) -> "Splits":
        """num_programs: decodes times KV heads. Few of them share their keys to fill the device; many do so
        only where a sequence is so long that all others would wait for it."""
        num_processors = processors(device)
        wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // max(num_programs, 1))
        if num_programs * _PROGRAMS_PER_PROCESSOR < num_processors:
            min_keys = 64
        else:
            min_keys = 128 if num_programs < 2 * num_processors else 512
        count = min(max(wanted, MIN_SPLITS), MAX_SPLITS)
        return cls(count, min_keys, fill_device=num_programs >= num_processors)


class DecodeWorkspace:
    """What the programs that share a decode hand to the last of them.

    counters: [decodes * Hkv], int32: programs that are done. Zero between launches; a launch leaves it so.
    num_programs: decodes times splits, at most.
    """

    def __init__(self, counters: Tensor, num_programs: int) -> None:
        self.counters = counters
        self._num_programs = num_programs
        self._partials: tuple[Tensor, Tensor] | None = None

    def partials(self, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """float32, for each (decode, KV head, split, query head of the group): the weighted sum of values
        [rows, head_dim], and the peak and total of the weights [rows, 2]. Made at the first call and kept:
        all layers use the same.

        num_heads: of queries.
        """
        if self._partials is None:
            rows = self._num_programs * num_heads
            self._partials = (
                self.counters.new_empty((rows, head_dim), dtype=torch.float32),
                self.counters.new_empty((rows, 2), dtype=torch.float32),
            )
        return self._partials


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """Of T tokens in S sequences: first those with one token, the decodes, then those with several, the
    prefills. In an IndexBuffer there may be room for more than a step has.

    All tensors are int32, on the device:
    counts: [5]: decodes; splits of each decode's keys; the least keys of a split; prefills; how many keys a
        decode has in the mean.
    slots: [T], in the order of q's rows: page * page_size + place in the page of a token's key and value;
        -1 writes nothing.
    positions: [T], in the order of q's rows.
    rows: [S], the row of q of each sequence's first token.
    starts: [S], its position; where it is negative, so are all of the sequence: rows of padding, whose output
        is zero.
    table_starts: [S], where a sequence's block table starts in tables.
    first_tokens: [prefills + 1], for each prefill how many tokens those before it have; then how many all
        have.
    tables: page numbers.

    What launches depend on:
    max_decodes, max_prefills, max_prefill_tokens: that there is room for.
    splits: of max_decodes decodes, those that there are; None where there may be fewer: their number, and
        their splits, are then read from counts.
    decode_programs: programs of each KV head for decodes: decodes times splits, at least.
    fill_device: see Splits.
    """

    counts: Tensor
    slots: Tensor
    positions: Tensor
    rows: Tensor
    starts: Tensor
    table_starts: Tensor
    first_tokens: Tensor
    tables: Tensor
    max_decodes: int
    max_prefills: int
    max_prefill_tokens: int
    splits: Splits | None
    decode_programs: int
    fill_device: bool
    workspace: DecodeWorkspace


def build_index(
    runs: Sequence[Run], *, page_size: int, num_kv_heads: int, device: torch.device
) -> AttentionIndex:
    """The index of one step."""
    sections = _sections(runs, [], page_size, num_kv_heads, device)
    num_decodes, _, _, num_prefills, _ = map(int, sections["counts"])
    sections["counters"] = np.zeros(num_decodes * num_kv_heads, dtype=np.int32)
    offsets = _offsets([len(section) for section in sections.values()])
    block = _to_pinned(sections, offsets, device).to(device, non_blocking=True)
    views = {
        name: block[offset : offset + len(section)]
        for (name, section), offset in zip(sections.items(), offsets, strict=False)
    }
    counters = views.pop("counters")
    splits = Splits.of(len(counters), device)
    programs = num_decodes * splits.count
    return AttentionIndex(
        **views,
        max_decodes=num_decodes,
        max_prefills=num_prefills,
        max_prefill_tokens=int(sections["first_tokens"][-1]),
        splits=splits,
        decode_programs=programs,
        fill_device=splits.fill_device,
        workspace=DecodeWorkspace(counters, programs),
    )


class IndexBuffer:
    """The index of step after step, in one place on the device, as CUDA graphs need.

    Steps that are filled in for a number of rows above their own are padded: in a buffer for decodes alone
    with one token each of so many sequences, else with one sequence of so many tokens.
    """

    def __init__(
        self,
        max_rows: int,
        max_sequences: int,
        max_pages: int,
        *,
        decodes_alone: bool,
        page_size: int,
        num_kv_heads: int,
        device: torch.device,
    ) -> None:
        """max_sequences: of a step, without padding. max_pages: of a sequence. decodes_alone: no step has a
        sequence of several tokens."""
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.max_pages = max_pages
        self.decodes_alone = decodes_alone
        self._page_size = page_size
        self._num_kv_heads = num_kv_heads
        self._device = device
        self._sizes = self._room(max_rows)
        self._offsets = _offsets(list(self._sizes.values()))
        self._block = torch.zeros(self._offsets[-1], dtype=torch.int32, device=device)
        counters = self._block.new_zeros(self._max_decodes(max_rows) * num_kv_heads)
        self._workspace = DecodeWorkspace(counters, self._decode_programs(max_rows))

    def index(self, num_rows: int) -> AttentionIndex:
        """The part that steps of num_rows rows, padding included, are filled in for."""
        views = {
            name: self._block[offset : offset + size]
            for (name, size), offset in zip(self._room(num_rows).items(), self._offsets, strict=False)
        }
        max_decodes = self._max_decodes(num_rows)
        splits = Splits.of(max_decodes * self._num_kv_heads, self._device)
        return AttentionIndex(
            **views,
            max_decodes=max_decodes,
            max_prefills=self._max_prefills(num_rows),
            max_prefill_tokens=num_rows,
            splits=splits if self.decodes_alone else None,
            decode_programs=self._decode_programs(num_rows),
            fill_device=splits.fill_device,
            workspace=self._workspace,
        )

    def fill(self, runs: Sequence[Run], num_rows: int) -> None:
        """runs: of at most num_rows tokens, and as the buffer was made for. Copies asynchronously."""
        missing = num_rows - sum(run.num_tokens for run in runs)
        padding = [1] * missing if self.decodes_alone else [missing] * bool(missing)
        sections = _sections(runs, padding, self._page_size, self._num_kv_heads, self._device)
        pinned = _to_pinned(sections, self._offsets, self._device)
        self._block[: pinned.shape[0]].copy_(pinned, non_blocking=True)

    def _room(self, num_rows: int) -> dict[str, int]:
        """The sizes of sections that hold any step of num_rows rows."""
        sequences = self._max_decodes(num_rows) if self.decodes_alone else self.max_sequences + 1
        return {
            "counts": 5,
            "slots": num_rows,
            "positions": num_rows,
            "rows": sequences,
            "starts": sequences,
            "table_starts": sequences,
            "first_tokens": self._max_prefills(num_rows) + 1,
            "tables": self.max_sequences * self.max_pages,
        }

    def _max_decodes(self, num_rows: int) -> int:
        return num_rows if self.decodes_alone else min(num_rows, self.max_sequences + 1)

    def _max_prefills(self, num_rows: int) -> int:
        return 0 if self.decodes_alone else min(max(num_rows // 2, 1), self.max_sequences + 1)

    def _decode_programs(self, num_rows: int) -> int:
        """Few decodes have many splits: not the most of them need the most programs."""
        return max(
            num_decodes * Splits.of(num_decodes * self._num_kv_heads, self._device).count
            for num_decodes in range(1, self._max_decodes(num_rows) + 1)
        )


def _sections(
    runs: Sequence[Run], padding: Sequence[int], page_size: int, num_kv_heads: int, device: torch.device
) -> Sections:
    """The block's parts in order. padding: the tokens of each sequence of padding, after the runs."""
    counts = _int32([*(run.num_tokens for run in runs), *padding])
    starts = _int32([*(run.start for run in runs), *(-size for size in padding)])
    sizes = _int32([*(len(run.pages) for run in runs), *(0 for _ in padding)])
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
    splits = Splits.of(num_decodes * num_kv_heads, device)
    num_splits = splits.count if num_decodes else 0
    num_keys = starts[(counts == 1) & (starts >= 0)] + 1
    mean_keys = int(num_keys.sum()) // max(len(num_keys), 1)
    return {
        "counts": _int32([num_decodes, num_splits, splits.min_keys, len(prefills), mean_keys]),
        "slots": _int32(slots),
        "positions": _int32(np.maximum(positions, 0)),
        "rows": rows[order],
        "starts": starts[order],
        "table_starts": table_starts[order],
        "first_tokens": _int32([*_before(prefills), prefills.sum()]),
        "tables": tables,
    }


def _to_pinned(sections: Sections, offsets: Sequence[int], device: torch.device) -> Tensor:
    """A block on the host with each section at its offset, up to the end of the last one. What is between
    them is left open. PyTorch keeps pinned memory from reuse until copies out of it are done."""
    end = offsets[len(sections) - 1] + len([*sections.values()][-1])
    block = torch.empty(end, dtype=torch.int32, pin_memory=device.type == "cuda")
    target = block.numpy()
    for section, offset in zip(sections.values(), offsets, strict=False):
        target[offset : offset + len(section)] = section
    return block


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each section starts, and where the last one ends."""
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _before(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """For each entry, the sum of those before it."""
    return _int32(np.cumsum(counts) - counts)


def _int32(values: Sequence[int] | NDArray[np.generic]) -> NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
