"""The LoRA op in torch: one adapter's rows of one packed linear at a time.

It is the path of CPUs and the reference of all others. Running adapter by adapter keeps adapters apart by
construction and costs each row its own adapter's rank. Concatenating adapters along rank and masking the
shrunk rows takes fewer calls but computes tokens x ranks of all adapters: with two adapters in a batch of 8
it measured no faster, with 32 slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltaplane_kernels.rank_pages import (
    RANK_PAGE_ROWS,
    AdapterRows,
    PackedLinearPlacement,
    RankPageLayout,
    SliceRows,
    rank_pages,
)


class Delta(Protocol):
    """What rows of a step get from one packed linear's adapter, or blend of adapters."""

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Adds the delta of x [n, in] to y [n, out] in place; columns that have none keep every bit."""
        ...


AdapterDeltas = Sequence[Mapping[str, Delta]]
"""By layer, then by name of the packed linear; linears that the adapter leaves alone are missing."""


@dataclass(frozen=True, slots=True)
class LinearDelta:
    """A plain adapter's part in one packed linear, in float32.

    a: [in, sum of ranks], the slices' A^T side by side.
    b: of each slice [rank, out_s]; None where the adapter lacks the slice.
    ranks, widths: of each slice, its columns in x A^T (0 where lacking) and in y.
    """

    a: Tensor
    b: tuple[Tensor | None, ...]
    ranks: tuple[int, ...]
    widths: tuple[int, ...]

    def add_to(self, y: Tensor, x: Tensor, weight: float = 1.0) -> None:
        """y [n, out] += weight (x [n, in] A^T) B in place; columns of lacking slices keep every bit.

        A step of a small model spends as long in calling these products as in computing them.
        """
        add = _add_product_float32 if y.dtype is torch.float32 else _add_product
        shrunk = torch.mm(x.float(), self.a)
        if weight != 1.0:
            shrunk *= weight
        if len(self.b) == 1:
            add(y, shrunk, self.b[0])
            return
        parts = zip(y.split_with_sizes(self.widths, 1), shrunk.split_with_sizes(self.ranks, 1), self.b)  # noqa: B905
        for columns, ranks, b in parts:
            add(columns, ranks, b)


def _add_product_float32(y: Tensor, shrunk: Tensor, b: Tensor | None) -> None:
    if b is not None:
        y.addmm_(shrunk, b)


def _add_product(y: Tensor, shrunk: Tensor, b: Tensor | None) -> None:
    if b is not None:
        y.add_(shrunk @ b)


@dataclass(frozen=True, slots=True)
class SliceTerms:
    """An adapter's part in one slice. b: [rank, out_s]; gain and bias: [out_s], or None. All in float32."""

    b: Tensor
    gain: Tensor | None
    bias: Tensor | None

    def add_to(self, y: Tensor, shrunk: Tensor) -> None:
        """y [n, out_s] += gain * y + bias + shrunk [n, rank] B in place, rounded once."""
        delta = shrunk @ self.b if self.bias is None else torch.addmm(self.bias, shrunk, self.b)
        if self.gain is not None:
            delta.addcmul_(y.float(), self.gain)
        y.add_(delta)


@dataclass(frozen=True, slots=True)
class AffineDelta:
    """The part in one packed linear of an adapter that has a gain or a bias there.

    a: [in, sum of ranks], float32, the slices' A^T side by side.
    terms: of each slice; None where the adapter lacks it.
    ranks, widths: as of LinearDelta.
    """

    a: Tensor
    terms: tuple[SliceTerms | None, ...]
    ranks: tuple[int, ...]
    widths: tuple[int, ...]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Adds the terms of each slice to its columns of y [n, out]."""
        shrunk = torch.mm(x.float(), self.a)
        columns, ranks = y.split_with_sizes(self.widths, 1), shrunk.split_with_sizes(self.ranks, 1)
        for own_y, own_shrunk, terms in zip(columns, ranks, self.terms, strict=True):
            if terms is not None:
                terms.add_to(own_y, own_shrunk)


@dataclass(frozen=True, slots=True)
class BlendDelta:
    """The weighted deltas of several plain adapters in one packed linear."""

    members: tuple[tuple[LinearDelta, float], ...]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Adds all members to y, which is rounded once."""
        total, x = y.float(), x.float()
        for delta, weight in self.members:
            delta.add_to(total, x, weight)
        if total is not y:
            y.copy_(total)


def blend_deltas(members: Sequence[tuple[AdapterDeltas, float]]) -> AdapterDeltas:
    """The deltas of a blend of plain adapters, each with its weight. No matrix is copied."""
    layers: list[dict[str, Delta]] = []
    for parts in zip(*(deltas for deltas, _ in members), strict=True):
        own: dict[str, list[tuple[LinearDelta, float]]] = {}
        for linears, (_, weight) in zip(parts, members, strict=True):
            for name, delta in linears.items():
                assert isinstance(delta, LinearDelta), "members of a blend are plain"
                own.setdefault(name, []).append((delta, weight))
        layers.append({name: BlendDelta(tuple(deltas)) for name, deltas in own.items()})
    return layers


def adapter_deltas(
    layout: RankPageLayout, pool_pages: Tensor, pages: Sequence[int], rows: AdapterRows
) -> AdapterDeltas:
    """The deltas of the adapter that lies in `pages` of pool_pages [num_pages, page_elements].

    Rows of a float32 page that is full are used where they lie. Others are copied: joined where they lie in
    several pages, at their true rank, in float32.
    """
    return [_layer_deltas(layout, pool_pages, pages, layer, row) for layer, row in enumerate(rows)]


def _layer_deltas(
    layout: RankPageLayout, pool_pages: Tensor, pages: Sequence[int], layer: int, rows: Sequence[SliceRows]
) -> dict[str, Delta]:
    deltas: dict[str, Delta] = {}
    for name, place in layout.placements.items():
        own = rows[place.first_slice : place.first_slice + len(place.linear.slices)]
        if any(one.num_rows for one in own):
            a = _shrink_matrix(layout.a(pool_pages, layer, name), pages, [one.rank for one in own])
            b = [layout.b(pool_pages, layer, name, index) for index in range(len(own))]
            deltas[name] = _linear_delta(place, a, b, pages, own)
    return deltas


def _linear_delta(
    place: PackedLinearPlacement,
    a: Tensor,
    b: Sequence[Tensor],
    pages: Sequence[int],
    own: Sequence[SliceRows],
) -> Delta:
    """b: of each slice, [num_pages, 8, out_s]. own: the rows of each slice."""
    ranks, widths = tuple(one.rank for one in own), tuple(part.out_features for part in place.linear.slices)
    if all(one.is_plain for one in own):
        matrices = [
            _rows(block, pages, one.rank).float() if one.rank else None
            for block, one in zip(b, own, strict=True)
        ]
        return LinearDelta(a, tuple(matrices), ranks, widths)
    terms = [
        _slice_terms(block, pages, one) if one.num_rows else None for block, one in zip(b, own, strict=True)
    ]
    return AffineDelta(a, tuple(terms), ranks, widths)


def _slice_terms(block: Tensor, pages: Sequence[int], own: SliceRows) -> SliceTerms:
    rows = _rows(block, pages, own.num_rows).float()
    return SliceTerms(
        b=rows[: own.rank],
        gain=rows[own.rank] if own.has_gain else None,
        bias=rows[-1] if own.has_bias else None,
    )


def _shrink_matrix(a: Tensor, pages: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """The rank rows of all slices, of a [num_pages, num_slices, 8, in], as [in, sum of ranks]."""
    if len(pages) == 1 and all(rank == RANK_PAGE_ROWS for rank in ranks):
        rows = a[pages[0]].flatten(0, 1)
    else:
        rows = torch.cat([_rows(a[:, index], pages, rank) for index, rank in enumerate(ranks)])
    return rows.float().T


def _rows(block: Tensor, pages: Sequence[int], num_rows: int) -> Tensor:
    """The first num_rows, over `pages`, of block [num_pages, 8, width]; a view where one page has all."""
    parts = [
        block[page, : num_rows - index * RANK_PAGE_ROWS]
        for index, page in enumerate(pages[: max(rank_pages(num_rows), 1)])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
