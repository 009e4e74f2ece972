"""The side ops in torch: embedding, norms and head, one adapter's rows at a time.

It is the path of CPUs and the reference of all others. As in lora_torch.py, running adapter by adapter keeps
adapters apart by construction: rows of the base model and of plain adapters keep every bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.side_pages import RowBlock, SidePageLayout, SideShape


@dataclass(frozen=True, slots=True)
class LowRank:
    """A and B^T of one matrix in float32, each [rank, width]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Table:
    """A trained embedding table that lies in side pages.

    rows: all rows of its pitch in the pool, [num_pages, rows_per_page, H]. pages: [side pages], int64.
    """

    block: RowBlock
    rows: Tensor
    pages: Tensor

    def lookup(self, tokens: Tensor) -> Tensor:
        """tokens: [n], int64. Returns [n, H]."""
        places = tokens + self.block.first
        pages = self.pages.index_select(0, places.div(self.block.rows_per_page, rounding_mode="floor"))
        return self.rows[pages, places % self.block.rows_per_page]


@dataclass(frozen=True, slots=True)
class AdapterSide:
    """What an adapter has outside the layers; None and missing where it has nothing.

    norms: the weights of norms by their paths, in the dtype of the pool.
    """

    head: LowRank | None
    embedding: LowRank | None
    table: Table | None
    norms: Mapping[str, Tensor]


def adapter_side(
    layout: SidePageLayout, pool_pages: Tensor, side_pages: Sequence[int], shape: SideShape
) -> AdapterSide:
    """What lies in `side_pages` of pool_pages [num_pages, page_elements].

    Rows of float32 pages are used where they lie, unless a matrix lies in several.
    """
    place = layout.place(shape)

    def low_rank(a: RowBlock | None, b: RowBlock | None) -> LowRank | None:
        if a is None or b is None:
            return None
        return LowRank(*(_joined(block, pool_pages, side_pages).float() for block in (a, b)))

    norms = {}
    if place.norm_row is not None:
        [[row]] = place.norm_row.runs(pool_pages, side_pages)
        norms = {norm: row.narrow(0, at, layout.outside.norms[norm]) for norm, at in place.norms.items()}
    return AdapterSide(
        head=low_rank(place.head_a, place.head_b),
        embedding=low_rank(place.embedding_a, place.embedding_b),
        table=_table(place.table, pool_pages, side_pages) if place.table is not None else None,
        norms=norms,
    )


def _joined(block: RowBlock, pool_pages: Tensor, side_pages: Sequence[int]) -> Tensor:
    runs = list(block.runs(pool_pages, side_pages))
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def _table(block: RowBlock, pool_pages: Tensor, side_pages: Sequence[int]) -> Table:
    rows = pool_pages.narrow(1, 0, block.rows_per_page * block.pitch)
    rows = rows.view(len(pool_pages), block.rows_per_page, block.pitch).narrow(2, 0, block.width)
    return Table(block, rows, torch.tensor(side_pages, device=pool_pages.device))


@dataclass(frozen=True, slots=True)
class TorchSideStep:
    """What the adapters of a step's rows do outside the layers. See side.SideStep.

    groups: the rows of each adapter that has anything there, [n], int64.
    """

    num_rows: int
    groups: Sequence[tuple[Tensor, AdapterSide]]

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        for rows, side in self.groups:
            if side.table is None and side.embedding is None:
                continue
            own = tokens.index_select(0, rows)
            embedded = x.index_select(0, rows) if side.table is None else side.table.lookup(own)
            if side.embedding is not None:
                embedded.add_(side.embedding.a.index_select(1, own).T @ side.embedding.b)
            x.index_copy_(0, rows, embedded)

    def norm_weight(self, norm: str, weight: Tensor) -> Tensor:
        trained = [(rows, side.norms[norm]) for rows, side in self.groups if norm in side.norms]
        if not trained:
            return weight
        weights = weight.repeat(self.num_rows, 1)
        for rows, own in trained:
            weights[rows] = own
        return weights

    def add_head_delta(self, x: Tensor, logits: Tensor) -> None:
        for rows, side in self.groups:
            if side.head is not None:
                shrunk = x.index_select(0, rows).float() @ side.head.a.T
                own = logits.index_select(0, rows).add_(shrunk @ side.head.b)
                logits.index_copy_(0, rows, own)

    def at(self, rows: Tensor) -> "TorchSideStep":
        groups = []
        for own, side in self.groups:
            found = torch.isin(rows, own).nonzero()[:, 0]
            if len(found):
                groups.append((found, side))
        return TorchSideStep(len(rows), groups)
