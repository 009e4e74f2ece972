"""What the side kernels read of each slot: which parts its adapter has, and where they lie.

Small tables on the pool's device, so that one CUDA graph serves any mix of adapters:

    parts   [num_slots, 8]           int32, see PART_*: ranks, and the first row of each block (side_pages.py)
    pages   [num_slots, most pages]  int32, the side pages of the slot
    norms   [num_slots, num_norms]   int64, the element of the pool where the weight of each norm starts; -1
                                     where the slot has none
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.side_pages import RowBlock, SidePageLayout, SideShape

PART_HEAD_RANK, PART_HEAD_A, PART_HEAD_B = 0, 1, 2
PART_EMBEDDING_RANK, PART_EMBEDDING_A, PART_EMBEDDING_B = 3, 4, 5
PART_TABLE = 6
"""-1 where there is none."""
NUM_PARTS = 8
MAX_RANK = 256
"""Of LoRA on the head and on the embedding, on a GPU."""


@dataclass(frozen=True, slots=True)
class SideTables:
    """The tables of one pool.

    pool: [num_pages, page_elements].
    norm_columns: the column of each norm, by its path.
    """

    layout: SidePageLayout
    pool: Tensor
    parts: Tensor
    pages: Tensor
    norms: Tensor
    norm_columns: dict[str, int]

    @classmethod
    def empty(cls, layout: SidePageLayout, pool: Tensor, num_slots: int) -> "SideTables":
        norms, device = layout.outside.norms, pool.device
        most_pages = min(layout.most_pages(MAX_RANK), len(pool))
        return cls(
            layout,
            pool,
            parts=torch.zeros(num_slots, NUM_PARTS, dtype=torch.int32, device=device),
            pages=torch.zeros(num_slots, most_pages, dtype=torch.int32, device=device),
            norms=torch.full((num_slots, len(norms)), -1, dtype=torch.int64, device=device),
            norm_columns={norm: column for column, norm in enumerate(norms)},
        )

    def rows_of(self, pages: Sequence[int], shape: SideShape) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the three tables, on the CPU, of an adapter of this shape in these side pages.

        Errors: ValueError where a rank is over MAX_RANK.
        """
        if max(shape.head_rank, shape.embedding_rank) > MAX_RANK:
            raise ValueError(
                f"ranks {shape.head_rank} and {shape.embedding_rank}; at most {MAX_RANK} on a GPU"
            )
        place = self.layout.place(shape)
        parts = [0] * NUM_PARTS
        parts[PART_HEAD_RANK], parts[PART_EMBEDDING_RANK] = shape.head_rank, shape.embedding_rank
        for part, block in (
            (PART_HEAD_A, place.head_a),
            (PART_HEAD_B, place.head_b),
            (PART_EMBEDDING_A, place.embedding_a),
            (PART_EMBEDDING_B, place.embedding_b),
            (PART_TABLE, place.table),
        ):
            parts[part] = _first(block)
        norms = [-1] * self.norms.shape[1]
        if place.norm_row is not None:
            page, start = place.norm_row.place(0)
            for norm, at in place.norms.items():
                norms[self.norm_columns[norm]] = pages[page] * self.layout.page_elements + start + at
        padded = [*pages, *[0] * (self.pages.shape[1] - len(pages))]
        return (
            torch.tensor(parts, dtype=torch.int32),
            torch.tensor(padded, dtype=torch.int32),
            torch.tensor(norms, dtype=torch.int64),
        )


def _first(block: RowBlock | None) -> int:
    return -1 if block is None else block.first
