"""What each slot holds, in a table on the GPU that the LoRA kernels read.

A row of 32-bit integers for each slot, for each of the blends that the last steps had, and for the base
model, whose matrices have rank 0:

    [0 : 33]   pages in the pool, those of a blend's members one after the other
    [33 : 66]  float32, by which x A^T of each of these pages is multiplied; of blends alone
    [66 : ]    of each adaptable matrix, slice by slice and layer by layer: its rank, the flags below

Rank rows of a blend reach from the first row of its first page to the last one that a member has. Rows
between, where a member's own end inside its pages, are zeros and add nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaplane_kernels.lora_segments import Blend
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, AdapterRows, adapter_rank_pages, rank_pages

MAX_RANK = 256
MAX_PAGES = rank_pages(MAX_RANK + 2)  # with a gain row and a bias row
HAS_GAIN, HAS_BIAS, IS_BLEND = 1 << 16, 1 << 17, 1 << 18
"""Flags of a matrix, above its rank."""

FACTORS_AT, SLICES_AT = MAX_PAGES, 2 * MAX_PAGES

_BoundBlend = tuple[tuple[int, int, float], ...]
"""Of each member its slot, which of the slot's bindings it is, and its weight: with a slot that is loaded
again it is another blend."""


class SlotTable:
    """The table, a copy of the slots' rows on the host, and which blends have a row.

    device: int32 [num_slots + max_blends + 1, width].
    base_row: the base model's.
    bind is called for one slot at a time, from any thread; the others belong to the thread of the steps.
    """

    def __init__(self, num_slots: int, max_blends: int, num_slices: int, device: torch.device) -> None:
        """num_slices: adaptable matrices, over all layers."""
        width = SLICES_AT + num_slices
        with torch.inference_mode(False):
            self.device = torch.zeros(num_slots + max_blends + 1, width, dtype=torch.int32, device=device)
            self._pinned = torch.zeros(num_slots, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.base_row = num_slots + max_blends
        self._rows = self._pinned.numpy()
        self._num_pages = [0] * num_slots
        self._bindings = [0] * num_slots
        self._blends: OrderedDict[_BoundBlend, int] = OrderedDict()
        self._free_rows = list(range(num_slots, self.base_row))

    def bind(self, slot: int, pages: Sequence[int], rows: AdapterRows) -> None:
        """Sends the row of an adapter whose rank pages are the first ones of `pages`, on the current stream.

        Errors: ValueError where a rank is above MAX_RANK.
        """
        highest = max(one.rank for layer in rows for one in layer)
        if highest > MAX_RANK:
            raise ValueError(f"an adapter of rank {highest}; at most rank {MAX_RANK} runs on a GPU")
        count = adapter_rank_pages(rows)
        self._bindings[slot] += 1
        self._num_pages[slot] = count
        self._rows[slot, :count] = pages[:count]
        self._rows[slot, SLICES_AT:] = [
            one.rank | one.has_gain * HAS_GAIN | one.has_bias * HAS_BIAS for layer in rows for one in layer
        ]
        self.device[slot].copy_(self._pinned[slot], non_blocking=True)

    def rows_of(self, blends: Sequence[Blend], staging: Tensor) -> list[int]:
        """The row of each blend, whose members are plain and bound. New ones are sent on the current stream,
        over those that were not asked for the longest: steps that are computed on that stream before this one
        still read the old ones.

        blends: at most max_blends, all different.
        staging: int32 [max_blends, width], pinned; in use until the current stream has passed this point.
        """
        rows = []
        for index, blend in enumerate(blends):
            key = tuple((slot, self._bindings[slot], weight) for slot, weight in blend)
            if key in self._blends:
                self._blends.move_to_end(key)
            else:
                row = self._free_rows.pop() if self._free_rows else self._blends.popitem(last=False)[1]
                self._write_blend(staging[index].numpy(), blend)
                self.device[row].copy_(staging[index], non_blocking=True)
                self._blends[key] = row
            rows.append(self._blends[key])
        return rows

    def _write_blend(self, row: NDArray[np.int32], blend: Blend) -> None:
        factors, slices = row[FACTORS_AT:SLICES_AT].view(np.float32), row[SLICES_AT:]
        slices[:] = 0
        begin = 0
        for slot, weight in blend:
            end = begin + self._num_pages[slot]
            row[begin:end] = self._rows[slot, : end - begin]
            factors[begin:end] = weight
            ranks = self._rows[slot, SLICES_AT:]
            np.copyto(slices, ranks + (begin * RANK_PAGE_ROWS | IS_BLEND), where=ranks > 0)
            begin = end
