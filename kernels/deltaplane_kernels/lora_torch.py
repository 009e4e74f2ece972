"""The LoRA op in torch: one adapter's rows of one packed linear at a time.

It is the path of CPUs and the reference of all others. Running adapter by adapter keeps adapters apart by
construction and costs each row its own adapter's rank. Concatenating adapters along rank and masking the
shrunk rows takes fewer calls but computes tokens x ranks of all adapters: with two adapters in a batch of 8
it measured no faster, with 32 slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, RankPageLayout, rank_pages

Ranks = Sequence[Sequence[int]]
"""The rank of each adaptable matrix, [num_layers][slices_per_layer]; 0 where an adapter leaves it alone."""


@dataclass(frozen=True, slots=True)
class LinearDelta:
    """An adapter's part in one packed linear, in float32.

    a: [in, sum of ranks], the slices' A^T side by side.
    b: of each slice [rank, out_s]; None where the adapter lacks the slice.
    ranks, widths: of each slice, its columns in x A^T (0 where lacking) and in y.
    """

    a: Tensor
    b: tuple[Tensor | None, ...]
    ranks: tuple[int, ...]
    widths: tuple[int, ...]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """y [n, out] += (x [n, in] A^T) B in place; columns of slices the adapter lacks keep every bit.

        A step of a small model spends as long in calling these products as in computing them.
        """
        add = _add_product_float32 if y.dtype is torch.float32 else _add_product
        shrunk = torch.mm(x.float(), self.a)
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


AdapterDeltas = Sequence[dict[str, LinearDelta]]
"""By layer, then by name of the packed linear; linears that the adapter leaves alone are missing."""


def adapter_deltas(
    layout: RankPageLayout, pool_pages: Tensor, pages: Sequence[int], ranks: Ranks
) -> AdapterDeltas:
    """The deltas of the adapter that lies in `pages` of pool_pages [num_pages, page_elements].

    Rows of a float32 page that is full are used where they lie. Others are copied: joined where they lie in
    several pages, at their true rank, in float32.
    """
    return [_layer_deltas(layout, pool_pages, pages, layer, row) for layer, row in enumerate(ranks)]


def _layer_deltas(
    layout: RankPageLayout, pool_pages: Tensor, pages: Sequence[int], layer: int, ranks: Sequence[int]
) -> dict[str, LinearDelta]:
    deltas = {}
    for name, place in layout.placements.items():
        own = tuple(ranks[place.first_slice : place.first_slice + len(place.linear.slices)])
        if any(own):
            b = [
                _rank_rows(layout.b(pool_pages, layer, name, index), pages, rank).float() if rank else None
                for index, rank in enumerate(own)
            ]
            deltas[name] = LinearDelta(
                a=_shrink_matrix(layout.a(pool_pages, layer, name), pages, own),
                b=tuple(b),
                ranks=own,
                widths=tuple(part.out_features for part in place.linear.slices),
            )
    return deltas


def _shrink_matrix(a: Tensor, pages: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """The rank rows of all slices, of a [num_pages, num_slices, 8, in], as [in, sum of ranks]."""
    if len(pages) == 1 and all(rank == RANK_PAGE_ROWS for rank in ranks):
        rows = a[pages[0]].flatten(0, 1)
    else:
        rows = torch.cat([_rank_rows(a[:, index], pages, rank) for index, rank in enumerate(ranks) if rank])
    return rows.float().T


def _rank_rows(block: Tensor, pages: Sequence[int], rank: int) -> Tensor:
    """The first `rank` rows, over `pages`, of block [num_pages, 8, width]; a view where one page has all."""
    parts = [
        block[page, : rank - index * RANK_PAGE_ROWS] for index, page in enumerate(pages[: rank_pages(rank)])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
