"""Where the rows of an adapter lie inside a rank page.

A page holds the same 8 rows of every adaptable matrix of every layer, as one run of elements, so that an
adapter of rank r is ceil(r / 8) pages and each page is loaded by one contiguous copy. S-LoRA (Sheng et al.,
2023) pages adapters by single rank rows of single matrices; a page across all layers needs fewer and larger
copies, and one list of pages for an adapter instead of one for each matrix.

In a page, layer by layer and linear by linear in the order of the AdapterLayout:

    A  [num_slices, 8, in]    the rows of each slice side by side
    B  [8, sum of out]        rank-major: row r of all slices in a row, in the order of y's columns

Rows of A, and the part of each slice in a row of B, start at multiples of 8 elements (16 bytes at least).

Over the pages of an adapter the rows of a slice's B are, as SliceRows says, its rank rows, its gain row and
its bias row, each [out_s]. Beside gain and bias rows A is zeros, and so is a page where a slice has no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, PackedLinear

RANK_PAGE_ROWS = 8
"""Rows of each matrix that a page holds."""

ALIGNMENT = 8
"""Elements; 16 bytes of a two-byte type and 32 of float32."""


class SliceRows(NamedTuple):
    """What an adapter holds of one adaptable matrix, which is a slice of a packed linear.

    rank: of its A and B; 0 where it has none.
    has_gain, has_bias: whether a gain row and a bias row [out_s] follow the rank rows of B (see lora.py).
    """

    rank: int
    has_gain: bool = False
    has_bias: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of B."""
        return self.rank + self.has_gain + self.has_bias

    @property
    def is_plain(self) -> bool:
        """Whether it is LoRA alone."""
        return not (self.has_gain or self.has_bias)


NO_ROWS = SliceRows(0)
"""Of a matrix that an adapter leaves alone."""

AdapterRows = Sequence[Sequence[SliceRows]]
"""The rows of each adaptable matrix, [num_layers][slices_per_layer]."""


def rank_pages(num_rows: int) -> int:
    """Pages that matrices of at most num_rows rows take, those of an adapter of that rank as a rule."""
    return -(-num_rows // RANK_PAGE_ROWS)


def adapter_rank_pages(rows: AdapterRows) -> int:
    """Rank pages that an adapter of these rows takes; at least one layer with one slice is needed."""
    return rank_pages(max(one.num_rows for layer in rows for one in layer))


def runs_of_neighbours(pages: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges [begin, end) of `pages` in which each page is the next after the one before it."""
    begins = [i for i, page in enumerate(pages) if i == 0 or page != pages[i - 1] + 1]
    return list(pairwise([*begins, len(pages)]))


def copy_pages(pool_pages: Tensor, pages: Sequence[int], host_pages: Tensor) -> None:
    """Copies host_pages [n, page_elements] into `pages`, n of them, of pool_pages [num_pages, page_elements];
    on a GPU on the current stream, which the host does not wait for where host_pages are pinned."""
    for begin, end in runs_of_neighbours(pages):
        target = pool_pages[pages[begin] : pages[begin] + end - begin]
        target.copy_(host_pages[begin:end], non_blocking=True)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class PackedLinearPlacement:
    """Where one packed linear lies, relative to its layer's part of a page. All in elements.

    a_offset, a_pitch: start of A, and elements from one of its rows to the next.
    b_offset, b_pitch: the same of B. b_columns: where each slice starts in a row of B.
    first_slice: index of its first slice among the slices of a layer.
    """

    linear: PackedLinear
    a_offset: int
    a_pitch: int
    b_offset: int
    b_pitch: int
    b_columns: tuple[int, ...]
    first_slice: int

    @property
    def end(self) -> int:
        return self.b_offset + RANK_PAGE_ROWS * self.b_pitch


def _place(linear: PackedLinear, offset: int, first_slice: int) -> PackedLinearPlacement:
    b_columns = [0]
    for part in linear.slices:
        b_columns.append(b_columns[-1] + _aligned(part.out_features))
    a_pitch = _aligned(linear.in_features)
    return PackedLinearPlacement(
        linear=linear,
        a_offset=offset,
        a_pitch=a_pitch,
        b_offset=offset + len(linear.slices) * RANK_PAGE_ROWS * a_pitch,
        b_pitch=b_columns[-1],
        b_columns=tuple(b_columns[:-1]),
        first_slice=first_slice,
    )


class RankPageLayout:
    """Sizes and strided views of rank pages; the same in host memory and on a device.

    page_elements: elements of one page.
    layer_elements: elements from one layer's part of a page to the next.
    slices_per_layer: adaptable matrices of a layer, over all its packed linears.
    """

    def __init__(self, adapter_layout: AdapterLayout) -> None:
        self.num_layers = adapter_layout.num_layers
        self.placements: dict[str, PackedLinearPlacement] = {}
        self.layer_elements = 0
        self.slices_per_layer = 0
        for linear in adapter_layout.linears:
            placement = _place(linear, self.layer_elements, self.slices_per_layer)
            self.placements[linear.name] = placement
            self.layer_elements = placement.end
            self.slices_per_layer += len(linear.slices)
        self.page_elements = self.num_layers * self.layer_elements

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page of `dtype`."""
        return self.page_elements * dtype.itemsize

    def a(self, pages: Tensor, layer: int, linear: str) -> Tensor:
        """View of A in `pages` [num_pages, page_elements]: [num_pages, num_slices, 8, in]."""
        place = self.placements[linear]
        num_slices = len(place.linear.slices)
        start = layer * self.layer_elements + place.a_offset
        block = pages.narrow(1, start, num_slices * RANK_PAGE_ROWS * place.a_pitch)
        rows = block.view(len(pages), num_slices, RANK_PAGE_ROWS, place.a_pitch)
        return rows.narrow(3, 0, place.linear.in_features)

    def b(self, pages: Tensor, layer: int, linear: str, index: int) -> Tensor:
        """View of slice `index` of B in `pages` [num_pages, page_elements]: [num_pages, 8, out_s]."""
        place = self.placements[linear]
        start = layer * self.layer_elements + place.b_offset
        block = pages.narrow(1, start, RANK_PAGE_ROWS * place.b_pitch)
        rows = block.view(len(pages), RANK_PAGE_ROWS, place.b_pitch)
        return rows.narrow(2, place.b_columns[index], place.linear.slices[index].out_features)
