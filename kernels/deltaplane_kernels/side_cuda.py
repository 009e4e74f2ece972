"""The side ops of a pool on a GPU: the tables of its slots, the slots of a step's rows, and launches.

The slots of the rows lie in one place on the device, where CUDA graphs find those of the step that was staged
last. Rows whose adapters have nothing outside the layers count as the base's, so a step of such ones alone
has nothing to send.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltaplane_kernels import side_triton
from deltaplane_kernels.cuda_copies import LoadStream, StepStaging
from deltaplane_kernels.lora_segments import BASE_SLOT, Runs
from deltaplane_kernels.norm import NormWeight, RowWeights
from deltaplane_kernels.rank_pages import copy_pages
from deltaplane_kernels.side import SideStep
from deltaplane_kernels.side_pages import SidePageLayout, SideShape
from deltaplane_kernels.side_tables import SideTables


class TableSideStep:
    """A step whose rows' slots are read on the device. See side.SideStep.

    slots: [T], int32; below 0 in rows that have nothing outside the layers.
    """

    def __init__(self, tables: SideTables, slots: Tensor) -> None:
        self._tables = tables
        self._slots = slots

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        side_triton.embed(self._tables, self._slots, tokens, x)

    def norm_weight(self, norm: str, weight: Tensor) -> NormWeight:
        offsets = self._tables.norms[:, self._tables.norm_columns[norm]]
        return RowWeights(weight, self._slots, offsets, self._tables.pool)

    def add_head_delta(self, x: Tensor, logits: Tensor) -> None:
        side_triton.add_head_delta(self._tables, self._slots, x, logits)

    def at(self, rows: Tensor) -> "TableSideStep":
        """Kernels of this step's norms read the slots ahead of others: call it before any later launch."""
        return TableSideStep(self._tables, self._slots.index_select(0, rows))


class CudaSide:
    """See side.Side. Slots are loaded from any thread; steps are for one thread."""

    def __init__(self, layout: SidePageLayout, pool_pages: Tensor, num_slots: int, max_tokens: int) -> None:
        device = pool_pages.device
        with torch.inference_mode(False):
            self._tables = SideTables.empty(layout, pool_pages, num_slots)
            self._slots = torch.full((max_tokens,), BASE_SLOT, dtype=torch.int32, device=device)
            self._slot_rows = [torch.zeros_like(row, device="cpu").pin_memory() for row in self._rows_at(0)]
        self._loads = LoadStream(device)
        torch.cuda.current_stream(device).synchronize()  # loads are on another stream
        self._staging = StepStaging(
            lambda: torch.zeros(max_tokens, dtype=torch.int32, pin_memory=True), device
        )
        self._num_staged = 0

    def load(self, slot: int, pages: Sequence[int], host_pages: Tensor, shape: SideShape) -> None:
        """Copies on a stream of its own, and returns when that is done.

        Errors: ValueError where a rank is over MAX_RANK.
        """
        rows = self._tables.rows_of(pages, shape)
        with self._loads.copying():
            copy_pages(self._tables.pool, pages, host_pages)
            for target, pinned, row in zip(self._rows_at(slot), self._slot_rows, rows, strict=True):
                target.copy_(pinned.copy_(row), non_blocking=True)

    def clear(self, slot: int) -> None:
        """Nothing reads the tables of a slot that no row has."""

    def step(self, runs: Runs, num_rows: int, with_side: Sequence[int]) -> SideStep | None:
        """Sends the slots of the rows behind what is on the current stream, if they are not there."""
        if with_side or self._num_staged:
            self._stage([(run, slot) for slot in with_side for run in runs[slot]])
        return TableSideStep(self._tables, self._slots[:num_rows]) if with_side else None

    def graph_step(self, num_rows: int) -> SideStep:
        """To capture in a CUDA graph: a replay computes what step() was last called with."""
        return TableSideStep(self._tables, self._slots[:num_rows])

    def _rows_at(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """The slot's rows of the tables, in the order of SideTables.rows_of."""
        tables = self._tables
        return tables.parts[slot], tables.pages[slot], tables.norms[slot]

    def _stage(self, runs: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Sends as many rows as reach over those of this step and those that the last one left."""
        last = max((stop for (_, stop), _ in runs), default=0)
        size = max(last, self._num_staged)
        with self._staging.turn() as pinned:
            rows = pinned.numpy()
            rows[:size] = BASE_SLOT
            for (start, stop), slot in runs:
                rows[start:stop] = slot
            self._slots[:size].copy_(pinned[:size], non_blocking=True)
        self._num_staged = last
