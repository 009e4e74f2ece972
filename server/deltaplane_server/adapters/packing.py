"""Packs an adapter's matrices into rank pages in host memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltaplane_kernels.rank_pages import NO_ROWS, RANK_PAGE_ROWS, AdapterRows, RankPageLayout
from deltaplane_kernels.side_pages import NOTHING, SideShape
from deltaplane_server.adapters.affine import Affine
from deltaplane_server.adapters.layer_runs import ALIGNMENT, LayerRun, layer_runs
from deltaplane_server.adapters.load_threads import LoadThreads
from deltaplane_server.adapters.lora_matrices import AdaptedSlice
from deltaplane_server.adapters.page_writes import PageWrites
from deltaplane_server.adapters.safetensors_header import DTYPES, TensorEntry
from deltaplane_server.adapters.tensor_values import converted, is_finite, tensor_of
from deltaplane_server.adapters.unservable import unservable

RUN_BYTES = 8 << 20
"""Of pages that are written by the same calls. Of the 84 MB of rank 16 on Llama-3-8B a layer takes 3, too
little work for what a call costs beside those of other threads. What is multiplied takes memory of its own,
half as much as the pages."""

PLAIN = Affine(None, None, None)
"""Of a linear that an adapter changes by A and B alone."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory, as a pool's rank pages have it.

    pages: [n, page_elements] of the pool's dtype.
    rows: of each adaptable matrix, [num_layers][slices_per_layer]; NO_ROWS where the adapter leaves it alone.
    side: what it has outside the linears of the layers.
    read_ms, pack_ms: how long it took to read the files, and to check and pack them.
    """

    pages: Tensor
    rows: AdapterRows
    read_ms: float
    pack_ms: float
    side: SideShape = NOTHING

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes


def pack_pages(
    slices: Sequence[AdaptedSlice],
    affines: Mapping[AdaptedSlice, Affine],
    body: Tensor,
    layout: RankPageLayout,
    pages: Tensor,
    threads: LoadThreads,
    *,
    are_finite: bool = False,
) -> None:
    """Writes A as it is, B^T times its scale, gains and biases, and zeros elsewhere, into rank pages
    [n, page_elements].

    slices: ordered by layer. affines: of those that are not plain.
    body: the bytes of the file after its header, uint8.
    are_finite: whether all values are known to be, also in the dtype of the pages, and need no look.
    Errors: InvalidArgumentError where a value is not finite, in the file or in the dtype of the pages. It
    names the first such matrix, whichever thread was the first to come upon one.
    """

    def write(writes: PageWrites) -> bool:
        writes.write()
        return are_finite or writes.has_finite_sums()

    aligned = body if body.storage_offset() % ALIGNMENT == 0 else body.clone()
    packer = _Packer(slices, affines, aligned, layout, pages)
    share = -(-layout.num_layers // threads.num_threads)
    in_cache = RUN_BYTES * layout.num_layers // max(pages.nbytes, 1)
    runs = layer_runs(slices, layout.num_layers, max(min(share, in_cache), 1))
    longest_first = sorted(runs, key=lambda run: run.count, reverse=True)
    if not all(threads.map(write, (packer.writes(run) for run in longest_first))):
        packer.check_each()


class _Packer:
    """Packs one adapter. See pack_pages."""

    def __init__(
        self,
        slices: Sequence[AdaptedSlice],
        affines: Mapping[AdaptedSlice, Affine],
        body: Tensor,
        layout: RankPageLayout,
        pages: Tensor,
    ) -> None:
        self._slices = slices
        self._affines = affines
        self._body = body
        self._layout = layout
        self._pages = pages
        self._body_offset = int(body.storage_offset())
        self._pages_offset = int(pages.storage_offset())
        self._storages = {
            dtype: torch.empty(0, dtype=dtype).set_(body.untyped_storage()) for dtype in DTYPES.values()
        }

    def writes(self, run: LayerRun) -> PageWrites:
        """What packs the layers of a run."""
        size = self._layout.layer_elements
        part = self._pages.narrow(1, run.first * size, run.count * size)
        writes = PageWrites(part, is_filled=self._is_filled(run))
        for one in run.slices:
            if one.lora is not None:
                place = self._place(one)
                self._put(writes, one.lora.a, one.rows.rank, place.a, run, 1.0)
                if one.lora.magnitude is None:
                    self._put(writes, one.lora.b, one.rows.rank, place.b, run, one.lora.scale)
        for one in self._affine_slices(run):
            self._put_affine(writes, one, self._affines[one])
        return writes

    def _is_filled(self, run: LayerRun) -> bool:
        """Whether A and B take every element of the run's layers in all pages, as those of one rank on all
        linears do where it is a multiple of RANK_PAGE_ROWS."""
        taken = 0
        for one in run.slices:
            linear = self._layout.placements[one.linear].linear
            taken += one.rows.rank * (linear.in_features + linear.slices[one.index].out_features)
        return taken == len(self._pages) * self._layout.layer_elements

    def _affine_slices(self, run: LayerRun) -> Iterator[AdaptedSlice]:
        layers = range(run.first, run.first + run.count)
        return (one for one in self._affines if one.layer in layers)

    def check_each(self) -> None:
        """Errors: as pack_pages. A sum may also overflow where no value is infinite."""
        for one in self._slices:
            affine = self._affines.get(one, PLAIN)
            if one.lora is not None:
                self._check(one.lora.a, 1.0)
                factor = 1.0 if affine.factor is None else affine.factor
                self._check(one.lora.b, one.lora.scale * factor)
            for vector, what in ((affine.gain, "gain of DoRA"), (affine.bias, "bias")):
                if vector is not None and not is_finite(vector.to(self._pages.dtype)):
                    raise unservable(
                        f"the {what} of layer {one.layer}'s {one.module} overflows {self._pages.dtype}"
                    )

    def _check(self, entry: TensorEntry, scale: "float | Tensor") -> None:
        tensor = tensor_of(entry, self._body[entry.start : entry.stop])
        converted(entry, tensor, scale if isinstance(scale, float) else scale[:, None], self._pages.dtype)

    def _place(self, one: AdaptedSlice) -> "_Place":
        place = self._layout.placements[one.linear]
        layer = self._pages_offset + one.layer * self._layout.layer_elements
        width, out = place.linear.in_features, place.linear.slices[one.index].out_features
        a = layer + place.a_offset + one.index * RANK_PAGE_ROWS * place.a_pitch
        b = layer + place.b_offset + place.b_columns[one.index]
        return _Place(
            _Rows(width, (width, 1), a, place.a_pitch), _Rows(out, (1, one.rows.rank), b, place.b_pitch)
        )

    def _put_affine(self, writes: PageWrites, one: AdaptedSlice, affine: Affine) -> None:
        """B times its scale and DoRA's factor, and the rows behind it."""
        rows = self._place(one).b
        if one.lora is not None and affine.factor is not None:
            alone = LayerRun(one.layer, 1, 0, [one])
            self._put(writes, one.lora.b, one.rows.rank, rows, alone, affine.factor * one.lora.scale)
        if affine.gain is not None:
            self._put_row(writes, affine.gain, one.rows.rank, rows)
        if affine.bias is not None:
            self._put_row(writes, affine.bias, one.rows.num_rows - 1, rows)

    def _put(
        self,
        writes: PageWrites,
        entry: TensorEntry,
        rank: int,
        rows: "_Rows",
        run: LayerRun,
        scale: "float | Tensor",
    ) -> None:
        """The rank rows of a matrix times the scale, one number or [width], in all layers of the run."""
        source, start = self._source(entry)
        row, column = rows.strides
        stride = run.stride // entry.dtype.itemsize
        page, layer = self._layout.page_elements, self._layout.layer_elements
        full, rest = divmod(rank, RANK_PAGE_ROWS)
        if full:
            shape = (run.count, full, RANK_PAGE_ROWS, rows.width)
            values = source.as_strided(shape, (stride, RANK_PAGE_ROWS * row, row, column), start)
            target = self._pages.as_strided(shape, (layer, page, rows.pitch, 1), rows.offset)
            writes.add(target, values, scale)
        if rest:
            part = (run.count, rest, rows.width)
            begin = start + full * RANK_PAGE_ROWS * row
            values = source.as_strided(part, (stride, row, column), begin)
            target = self._pages.as_strided(part, (layer, rows.pitch, 1), rows.offset + full * page)
            writes.add(target, values, scale)

    def _put_row(self, writes: PageWrites, vector: Tensor, number: int, rows: "_Rows") -> None:
        """A vector as row `number`, counted over all pages."""
        page, row = divmod(number, RANK_PAGE_ROWS)
        start = rows.offset + page * self._layout.page_elements + row * rows.pitch
        writes.add(self._pages.as_strided(vector.shape, (1,), start), vector)

    def _source(self, entry: TensorEntry) -> tuple[Tensor, int]:
        """A tensor of the entry's dtype, and the element of its storage that the entry begins at."""
        start, odd = divmod(self._body_offset + entry.start, entry.dtype.itemsize)
        if odd:
            return self._body[entry.start : entry.stop].clone().view(entry.dtype), 0
        return self._storages[entry.dtype], start


class _Rows(NamedTuple):
    """Where rows of one matrix are, in elements.

    strides: of a row and a column in the file. offset, pitch: where the first row begins in the first page,
    and from one row of a page to the next.
    """

    width: int
    strides: tuple[int, int]
    offset: int
    pitch: int


class _Place(NamedTuple):
    """Where A and B of one linear are."""

    a: _Rows
    b: _Rows


def rows_of(slices: Sequence[AdaptedSlice], layout: RankPageLayout) -> AdapterRows:
    """The rows of each adaptable matrix, [num_layers][slices_per_layer]."""
    rows = [[NO_ROWS] * layout.slices_per_layer for _ in range(layout.num_layers)]
    for one in slices:
        rows[one.layer][layout.placements[one.linear].first_slice + one.index] = one.rows
    return rows
