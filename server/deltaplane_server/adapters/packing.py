"""Packs an adapter's matrices into rank pages in host memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltaplane_kernels.rank_pages import NO_ROWS, RANK_PAGE_ROWS, AdapterRows, RankPageLayout
from deltaplane_kernels.side_pages import NOTHING, SideShape
from deltaplane_server.adapters.affine import Affine
from deltaplane_server.adapters.layer_runs import LayerRun, layer_runs
from deltaplane_server.adapters.load_threads import LoadThreads
from deltaplane_server.adapters.lora_matrices import AdaptedSlice
from deltaplane_server.adapters.safetensors_header import DTYPES, TensorEntry
from deltaplane_server.adapters.tensor_values import converted, has_finite_sum, is_finite, tensor_of
from deltaplane_server.adapters.unservable import unservable

RUN_BYTES = 6 << 20
"""Of pages that are written by the same calls. They are gone over three times, out of a core's cache or not:
with 16 MB of it the 84 MB of rank 16 on Llama-3-8B take 20 ms layer by layer, and 60 ten layers at a time."""

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
) -> None:
    """Writes A as it is, B^T times its scale, gains and biases, and zeros elsewhere, into rank pages
    [n, page_elements].

    slices: ordered by layer. affines: of those that are not plain.
    body: the bytes of the file after its header, uint8.
    Errors: InvalidArgumentError where a value is not finite, in the file or in the dtype of the pages. It
    names the first such matrix, whichever thread was the first to come upon one.
    """
    packer = _Packer(slices, affines, body, layout, pages)
    share = -(-layout.num_layers // threads.num_threads)
    in_cache = RUN_BYTES * layout.num_layers // max(pages.nbytes, 1)
    runs = layer_runs(slices, layout.num_layers, max(min(share, in_cache), 1))
    if not all(threads.map(packer.pack_run, runs)):
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

    def pack_run(self, run: LayerRun) -> bool:
        """Packs the layers of a run. Answers whether their sum is finite, and so all their values."""
        size = self._layout.layer_elements
        target = self._pages.narrow(1, run.first * size, run.count * size).zero_()
        for one in run.slices:
            if one.lora is not None:
                place = self._place(one)
                self._put(one.lora.a, one.rows.rank, place.a, run, 1.0)
                if one.lora.magnitude is None:
                    self._put(one.lora.b, one.rows.rank, place.b, run, one.lora.scale)
        for one in self._affine_slices(run):
            self._put_affine(one, self._affines[one])
        return has_finite_sum(target)

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

    def _put_affine(self, one: AdaptedSlice, affine: Affine) -> None:
        """Writes B times its scale and DoRA's factor, and the rows behind it."""
        rows = self._place(one).b
        if one.lora is not None and affine.factor is not None:
            alone = LayerRun(one.layer, 1, 0, [one])
            self._put(one.lora.b, one.rows.rank, rows, alone, affine.factor * one.lora.scale)
        if affine.gain is not None:
            self._put_row(affine.gain, one.rows.rank, rows)
        if affine.bias is not None:
            self._put_row(affine.bias, one.rows.num_rows - 1, rows)

    def _put(
        self, entry: TensorEntry, rank: int, rows: "_Rows", run: LayerRun, scale: "float | Tensor"
    ) -> None:
        """Writes the rank rows of a matrix times the scale, one number or [width], in all layers of the run.

        One call of torch for each view: they hold the GIL, which running streams feel.
        """
        source, start = self._source(entry, run)
        row, column = rows.strides
        stride = run.stride // entry.dtype.itemsize
        page, layer = self._layout.page_elements, self._layout.layer_elements
        full, rest = divmod(rank, RANK_PAGE_ROWS)
        if full:
            shape = (run.count, full, RANK_PAGE_ROWS, rows.width)
            values = source.as_strided(shape, (stride, RANK_PAGE_ROWS * row, row, column), start)
            target = self._pages.as_strided(shape, (layer, page, rows.pitch, 1), rows.offset)
            _scale_into(target, values, scale)
        if rest:
            part = (run.count, rest, rows.width)
            begin = start + full * RANK_PAGE_ROWS * row
            values = source.as_strided(part, (stride, row, column), begin)
            target = self._pages.as_strided(part, (layer, rows.pitch, 1), rows.offset + full * page)
            _scale_into(target, values, scale)

    def _put_row(self, vector: Tensor, number: int, rows: "_Rows") -> None:
        """Writes a vector as row `number`, counted over all pages."""
        page, row = divmod(number, RANK_PAGE_ROWS)
        start = rows.offset + page * self._layout.page_elements + row * rows.pitch
        self._pages.as_strided(vector.shape, (1,), start).copy_(vector)

    def _source(self, entry: TensorEntry, run: LayerRun) -> tuple[Tensor, int]:
        """A tensor of the entry's dtype, and the element of its storage that the entry begins at; of all
        entries of the run, which lie `stride` bytes apart."""
        start, odd = divmod(self._body_offset + entry.start, entry.dtype.itemsize)
        if odd:
            stop = entry.stop + (run.count - 1) * run.stride
            return self._body[entry.start : stop].clone().view(entry.dtype), 0
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


def _scale_into(target: Tensor, source: Tensor, scale: "float | Tensor") -> None:
    """target = source * scale, computed in float32 and rounded once. A number multiplies 16-bit tensors in
    float32 on a CPU."""
    if source.dtype == target.dtype and isinstance(scale, float):
        target.copy_(source)
        if scale != 1.0:
            target.mul_(scale)
    else:
        target.copy_(source.float().mul(scale))


def rows_of(slices: Sequence[AdaptedSlice], layout: RankPageLayout) -> AdapterRows:
    """The rows of each adaptable matrix, [num_layers][slices_per_layer]."""
    rows = [[NO_ROWS] * layout.slices_per_layer for _ in range(layout.num_layers)]
    for one in slices:
        rows[one.layer][layout.placements[one.linear].first_slice + one.index] = one.rows
    return rows
