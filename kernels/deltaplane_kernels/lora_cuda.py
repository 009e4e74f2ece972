"""The LoRA op on a GPU: csrc/lora.cu, its launches and the step's table that it reads.

Two kernels for a packed linear: shrink writes x A^T of each split of the input columns, in float32, times the
weight in a blend; expand sums the splits and adds the product with B to y, and gain and bias where there are
any. Nothing must be zeroed first, nothing is added atomically.

The two numbers, for Llama-3-8B (32 layers, all seven linears, rank 16, two-byte types):

    bytes        84 MB for each distinct adapter of a step (A and B once), and 5.5 MB for each row (y read and
                 written): 5.7 GB, or 1.3 ms at 4.26 TB/s, at 64 rows of 64 adapters; 45 GB, most of it y, at
                 8192 rows of one
    operations   84 MFLOP of shrink and expand for each row, with expand's part done twice (see expand.cuh):
                 nothing for decodes, 1 TFLOP at 8192 rows, under 1 % of the base model's 114

So decodes are bound by bytes where adapters differ, or by the instructions that fetch them a few KB at a
time, and by the launches (256 a step) where they do not: hence one graph for any mix, weights read once for
all rows of a tile, blocks that walk from item to neighbouring item, and an expand that starts, and loads B,
while shrink and the base product before it run (programmatic dependent launch): a decode step of 64 rows and
64 adapters takes 6.7 ms so, instead of 6.84. In decodes the expands of o_proj and
down_proj go on to the residual stream and its norm (lora_norm_cuda.py), which is a launch less and less to
write. Punica (Chen et al., 2023) and its successors split shrink over the input columns too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_kernels.cuda_copies import LoadStream, StepStaging
from deltaplane_kernels.cuda_module import CudaKernel, CudaModule, load_module
from deltaplane_kernels.few_rows_cuda import ROWS
from deltaplane_kernels.linear import BaseProduct
from deltaplane_kernels.lora_launch import THREADS, Launch, check_layout, column_blocks, widths_of_one_slice
from deltaplane_kernels.lora_norm_cuda import ExpandAddRmsNorm
from deltaplane_kernels.lora_segments import Blend, Runs
from deltaplane_kernels.lora_slots import FACTORS_AT, MAX_RANK, SLICES_AT, SlotTable
from deltaplane_kernels.lora_tiles import LONG_TILE, SHORT_TILE, table_size, tile_rows, write_table
from deltaplane_kernels.norm import NormWeight, add_rms_norm
from deltaplane_kernels.rank_pages import (
    ALIGNMENT,
    AdapterRows,
    PackedLinearPlacement,
    RankPageLayout,
    copy_pages,
)

SOURCE = Path(__file__).parent / "csrc" / "lora.cu"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

BESIDE_COLUMNS, AHEAD_COLUMNS = 2048, 1024
"""Fewest input columns of a split: of a shrink that runs beside its product, as in steps of up to ROWS rows,
and of one ahead of it, whose time counts in full. Shorter ones take expand more time to sum than they save
shrink."""

SPLIT_ALIGNMENT = 128
"""A split is a multiple of the columns that a block reads at a time."""


@dataclass(frozen=True, slots=True)
class Splits:
    """How shrink divides the input columns: `count` parts of `width`, the last one may be shorter."""

    count: int
    width: int


def plan_splits(num_rows: int, in_features: int, num_slices: int, num_multiprocessors: int) -> Splits:
    """As many splits as give each multiprocessor two blocks even if all rows are of one adapter."""
    tiles = -(-num_rows // tile_rows(num_rows))
    wanted = -(-2 * num_multiprocessors // (tiles * num_slices))
    least = BESIDE_COLUMNS if num_rows <= ROWS else AHEAD_COLUMNS
    count = min(wanted, -(-in_features // least))
    width = -(-in_features // (count * SPLIT_ALIGNMENT)) * SPLIT_ALIGNMENT
    return Splits(-(-in_features // width), width)


def partial_elements(layout: RankPageLayout, max_tokens: int, num_multiprocessors: int) -> int:
    """float32 elements that any shrink over at most max_tokens rows writes, over all its splits."""
    shapes = {(place.linear.in_features, len(place.linear.slices)) for place in layout.placements.values()}
    return max(
        plan_splits(rows, width, slices, num_multiprocessors).count * rows * slices * MAX_RANK
        for rows in range(1, max_tokens + 1)
        for width, slices in shapes
    )


class CudaLora:
    """The kernels of one pool, the slot table that they read, the step's table and the workspace.

    All device memory is taken here. Slots are loaded from any thread; steps and deltas are for one thread and
    one stream.

    max_tokens, max_blends: most rows of a step, and most different blends.
    """

    def __init__(
        self, layout: RankPageLayout, pages: Tensor, num_slots: int, max_tokens: int, max_blends: int
    ) -> None:
        """pages: [num_pages, page_elements], bfloat16, float16 or float32.

        Errors: ValueError of check_layout and for other dtypes; CompileError, KernelError.
        """
        check_layout(layout)
        if pages.dtype not in DTYPES:
            raise ValueError(f"adapters on a GPU are {', '.join(DTYPES.values())}, not {pages.dtype}")
        self._layout = layout
        self._pages = pages
        self._device = pages.device
        self._max_tokens = max_tokens
        self._loads = LoadStream(self._device)
        properties = torch.cuda.get_device_properties(self._device)
        self._num_multiprocessors = properties.multi_processor_count
        with torch.inference_mode(False):
            self._table = torch.zeros(table_size(max_tokens), dtype=torch.int32, device=self._device)
            self._partial = torch.empty(
                partial_elements(layout, max_tokens, self._num_multiprocessors),
                dtype=torch.float32,
                device=self._device,
            )
        num_slices = layout.num_layers * layout.slices_per_layer
        self._slots = SlotTable(num_slots, max_blends, num_slices, self._device)
        torch.cuda.current_stream(self._device).synchronize()  # loads are on another stream
        self._staging = StepStaging(
            lambda: _StepMemory(table_size(max_tokens), max_blends, self._slots.device.shape[1]), self._device
        )
        self._begun: _Begun | None = None
        self._launches = {
            (layer, name): self._static_launch(layer, place)
            for layer in range(layout.num_layers)
            for name, place in layout.placements.items()
        }
        with torch.inference_mode(False):
            flags = torch.zeros(len(self._launches), dtype=torch.int32, device=self._device)
        self._x_is_there = dict(zip(self._launches, torch.split(flags, 1), strict=True))
        module = load_module(SOURCE, self._device)
        dtype = DTYPES[pages.dtype]
        self._shrink = _shrink_kernels(module, dtype)
        self._expand = module.kernel(f"expand_{dtype}", THREADS)
        self._expand_norm: ExpandAddRmsNorm | None = None
        if pages.dtype.itemsize == 2 and properties.major >= 9:
            self._expand_norm = ExpandAddRmsNorm(module, dtype, widths_of_one_slice(layout))

    def load(self, slot: int, pages: Sequence[int], host_pages: Tensor, rows: AdapterRows) -> None:
        """Copies an adapter and its row of the slot table on a stream of their own; returns when done.

        Pinned host_pages are copied at the speed of the bus.
        Errors: ValueError where a rank is above MAX_RANK.
        """
        with self._loads.copying():
            copy_pages(self._pages, pages, host_pages)
            self._slots.bind(slot, pages, rows)

    def stage(self, runs: Runs, blends: Sequence[Blend], num_tokens: int) -> None:
        """Sends the table of a step to the device, behind what is on the current stream.

        blends: those in runs; their members are bound and plain, and have no more than MAX_RANK rows in all.
        Errors: ValueError for more rows than max_tokens.
        """
        self.check_rows(num_tokens)
        self._begun = None
        with self._staging.turn() as memory:
            row_of = dict(zip(blends, self._slots.rows_of(blends, memory.blends), strict=True))
            runs_by_row = {
                slots if isinstance(slots, int) else row_of[slots]: own_runs
                for slots, own_runs in runs.items()
            }
            used = write_table(memory.table, runs_by_row, self._slots.base_row, num_tokens)
            self._table[:used].copy_(memory.pinned[:used], non_blocking=True)

    def check_rows(self, num_rows: int) -> None:
        """Errors: ValueError for more rows than max_tokens."""
        if num_rows > self._max_tokens:
            raise ValueError(
                f"a step of {num_rows} tokens; this pool was made with max_tokens={self._max_tokens}"
            )

    def base_product(self, layer: int, linear: str, x: Tensor, base: BaseProduct) -> Tensor:
        """base(x), and shrink.

        Launched behind a product that announces when x is there, shrink runs beside it and waits for no more
        than that; and so expand, launched behind both, starts and loads B while the product runs. Other
        products leave a kernel beside them no room: shrink comes before them, and loads A while the kernel
        ahead runs.
        Errors: RuntimeError where what was begun last was not added; those of add_delta.
        """
        if self._begun is not None:
            raise RuntimeError(f"a step goes on without add_delta of {self._begun}")
        if base.can_announce(len(x)):
            x_is_there = self._x_is_there[layer, linear]  # its own: the linears next to it may run beside it
            y = base(x, x_is_there=x_is_there)
            self._launch_shrink(layer, linear, x, x_is_there)
        else:
            self._launch_shrink(layer, linear, x)
            y = base(x)
        self._begun = _Begun(layer, linear, x.data_ptr())
        return y

    def add_delta(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None:
        """Adds the deltas of the rows that the step's table names; x [T, in], y [T, out].

        The two launches depend on T alone, so that they may be captured in a graph: a replay computes the
        step that was staged last.
        Errors: ValueError for tensors of another shape, dtype, device or alignment; KernelError.
        """
        self._shrink_unless_begun(layer, linear, x)
        self._launch_expand(layer, linear, y)

    def add_delta_rms_norm(
        self, layer: int, linear: str, x: Tensor, y: Tensor, residual: Tensor, weight: NormWeight, eps: float
    ) -> Tensor:
        """As add_delta and then norm.add_rms_norm. What y is afterwards is left open.

        Steps of few rows (lora_norm_cuda.MAX_ROWS) of two-byte types take two launches on a GPU that has
        clusters. These leave the rows of a graph that the step does not have as they find them, in residual
        and in a new tensor.
        """
        fused = self._expand_norm
        if fused is None or not fused.takes(linear, len(y)):
            self.add_delta(layer, linear, x, y)
            return add_rms_norm(y, residual, weight, eps)
        for name, operand in (("y", y), ("residual", residual)):
            self._check_operand(name, operand, self._layout.placements[linear].linear.out_features)
        if not residual.is_contiguous():
            raise RuntimeError(f"residual must be contiguous; its strides are {residual.stride()}")
        self._shrink_unless_begun(layer, linear, x)
        launch = self._launches[layer, linear]
        launch.y, launch.y_pitch = y.data_ptr(), y.stride(0)
        return fused.launch(
            launch,
            residual,
            weight,
            eps,
            stream=self._stream(),
            operands=partial(_described, layer, linear, "y", y),
        )

    def _shrink_unless_begun(self, layer: int, linear: str, x: Tensor) -> None:
        """Launches shrink of x, where base_product has not done so. Nothing is begun any more then."""
        begun = self._begun
        if begun is None:
            self._launch_shrink(layer, linear, x)
        elif begun != _Begun(layer, linear, x.data_ptr()):
            raise RuntimeError(f"add_delta of {linear} of layer {layer} where that of {begun} was begun")
        self._begun = None

    def _launch_shrink(self, layer: int, linear: str, x: Tensor, x_is_there: Tensor | None = None) -> None:
        place = self._layout.placements[linear]
        self._check_operand("x", x, place.linear.in_features)
        launch = self._launches[layer, linear]
        splits = plan_splits(len(x), place.linear.in_features, launch.num_slices, self._num_multiprocessors)
        launch.x, launch.x_pitch = x.data_ptr(), x.stride(0)
        launch.x_is_there = None if x_is_there is None else x_is_there.data_ptr()
        launch.num_rows, launch.splits, launch.split_width = len(x), splits.count, splits.width
        kernel = self._shrink[tile_rows(len(x))]
        items = len(x) * launch.num_slices * splits.count
        operands = partial(_described, layer, linear, "x", x)
        kernel.launch(min(items, kernel.resident_blocks), self._stream(), launch, operands)

    def _launch_expand(self, layer: int, linear: str, y: Tensor) -> None:
        self._check_operand("y", y, self._layout.placements[linear].linear.out_features)
        launch = self._launches[layer, linear]
        launch.y, launch.y_pitch = y.data_ptr(), y.stride(0)
        items = len(y) * launch.column_blocks
        operands = partial(_described, layer, linear, "y", y)
        self._expand.launch(min(items, self._expand.resident_blocks), self._stream(), launch, operands)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _check_operand(self, name: str, tensor: Tensor, width: int) -> None:
        if tensor.ndim != 2 or tensor.shape[1] != width:
            raise ValueError(f"{name} is {tuple(tensor.shape)} where [rows, {width}] is needed")
        if tensor.dtype != self._pages.dtype or tensor.device != self._device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} where the adapters are {self._pages.dtype} "
                f"on {self._device}"
            )
        if tensor.data_ptr() % 16 or tensor.stride(1) != 1 or tensor.stride(0) % ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of 16 bytes and have rows of neighbouring elements that "
                f"start at multiples of {ALIGNMENT}; its strides are {tensor.stride()}"
            )

    def _static_launch(self, layer: int, place: PackedLinearPlacement) -> Launch:
        """A launch of this layer and linear, without operands."""
        element = self._pages.element_size()
        start = self._pages.data_ptr() + layer * self._layout.layer_elements * element
        slices = place.linear.slices
        launch = Launch(
            a=start + place.a_offset * element,
            b=start + place.b_offset * element,
            partial=self._partial.data_ptr(),
            step=self._table.data_ptr(),
            slots=self._slots.device.data_ptr(),
            page_stride=self._layout.page_elements,
            a_pitch=place.a_pitch,
            b_pitch=place.b_pitch,
            slots_pitch=self._slots.device.stride(0),
            factors_at=FACTORS_AT,
            slices_at=SLICES_AT + layer * self._layout.slices_per_layer + place.first_slice,
            in_features=place.linear.in_features,
            num_slices=len(slices),
            column_blocks=column_blocks(place),
        )
        column = 0
        for index, part in enumerate(slices):
            launch.y_column[index] = column
            launch.b_column[index] = place.b_columns[index]
            launch.width[index] = part.out_features
            column += part.out_features
        return launch


def _described(layer: int, linear: str, name: str, tensor: Tensor) -> str:
    return f"{linear} of layer {layer}, {name} {tuple(tensor.shape)} of {tensor.dtype}"


@dataclass(frozen=True, slots=True)
class _Begun:
    """A delta of which shrink is launched. x: its address."""

    layer: int
    linear: str
    x: int

    def __str__(self) -> str:
        return f"{self.linear} of layer {self.layer}"


class _StepMemory:
    """Pinned memory for one step's table and new blends."""

    def __init__(self, table_size: int, max_blends: int, slot_width: int) -> None:
        self.pinned = torch.zeros(table_size, dtype=torch.int32, pin_memory=True)
        self.blends = torch.zeros(max_blends, slot_width, dtype=torch.int32, pin_memory=True)
        self.table = self.pinned.numpy()


def _shrink_kernels(module: CudaModule, dtype: str) -> dict[int, CudaKernel]:
    """The shrink of each size of tile."""
    names = {rows: f"shrink_{dtype}_{rows}" for rows in (SHORT_TILE, LONG_TILE)}
    if dtype == "float32":
        names = dict.fromkeys(names, "shrink_float32")
    return {rows: module.kernel(name, THREADS) for rows, name in names.items()}
