"""Packs an adapter's matrices into rank pages in host memory."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.lora_torch import Ranks
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, RankPageLayout
from deltaplane_server.adapters.load_threads import LoadThreads
from deltaplane_server.adapters.lora_matrices import LoraMatrices
from deltaplane_server.adapters.safetensors_header import DTYPES, TensorEntry
from deltaplane_server.adapters.unservable import shown, unservable


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory, as a pool's rank pages have it.

    pages: [n, page_elements] of the pool's dtype.
    ranks: of each adaptable matrix, [num_layers][slices_per_layer]; 0 where the adapter leaves it alone.
    read_ms, pack_ms: how long it took to read the files, and to check and pack them.
    """

    pages: Tensor
    ranks: Ranks
    read_ms: float
    pack_ms: float

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes


def tensor_of(entry: TensorEntry, data: Tensor) -> Tensor:
    """The tensor whose bytes are `data`, uint8."""
    aligned = data if data.storage_offset() % entry.dtype.itemsize == 0 else data.clone()
    return aligned.view(entry.dtype).view(entry.shape)


def converted(entry: TensorEntry, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """tensor * scale, computed in float32, as dtype.

    Errors: InvalidArgumentError where the tensor, or the result, has a value that is not finite.
    """
    unchanged = scale == 1.0 and tensor.dtype == dtype
    result = tensor if unchanged else tensor.float().mul(scale).to(dtype)
    if not _is_finite(result):
        if not _is_finite(tensor):
            raise unservable(f"{shown(entry.name)} has values that are NaN or infinite")
        raise unservable(f"{shown(entry.name)} has values that times the scale {scale:g} overflow {dtype}")
    return result


def _is_finite(tensor: Tensor) -> bool:
    return _has_finite_sum(tensor) or bool(tensor.isfinite().all())


def _has_finite_sum(tensor: Tensor) -> bool:
    """A sum that is finite says that all values are, at a twentieth of the time that looking at each value
    takes; one that is not may have overflowed itself."""
    return math.isfinite(tensor.sum(dtype=torch.float32).item())


def pack_pages(
    matrices: Sequence[LoraMatrices],
    body: Tensor,
    layout: RankPageLayout,
    pages: Tensor,
    threads: LoadThreads,
) -> None:
    """Writes A as it is, B^T times its scale, and zeros elsewhere, into rank pages [n, page_elements].

    matrices: ordered by layer. body: the bytes of the file after its header, uint8.
    Errors: InvalidArgumentError where a value is not finite, in the file or in the dtype of the pages. It
    names the first such matrix, whichever thread was the first to come upon one.
    """
    packer = _Packer(matrices, body, layout, pages)
    if not all(threads.map(packer.pack_layer, range(layout.num_layers))):
        packer.check_each()


class _Packer:
    """Packs one adapter. See pack_pages."""

    def __init__(
        self, matrices: Sequence[LoraMatrices], body: Tensor, layout: RankPageLayout, pages: Tensor
    ) -> None:
        self._matrices = matrices
        self._body = body
        self._layout = layout
        self._pages = pages
        self._body_offset = int(body.storage_offset())
        self._pages_offset = int(pages.storage_offset())
        self._storages = {
            dtype: torch.empty(0, dtype=dtype).set_(body.untyped_storage()) for dtype in DTYPES.values()
        }

    def pack_layer(self, layer: int) -> bool:
        """Packs a layer. Answers whether its sum is finite, and so all its values; they are still in a core's
        cache then."""
        size = self._layout.layer_elements
        target = self._pages.narrow(1, layer * size, size).zero_()
        begin, end = (bisect_left(self._matrices, i, key=lambda one: one.layer) for i in (layer, layer + 1))
        for one in self._matrices[begin:end]:
            self._pack(one)
        return _has_finite_sum(target)

    def check_each(self) -> None:
        """Errors: as pack_pages. A sum may also overflow where no value is infinite."""
        for one in self._matrices:
            for entry, scale in ((one.a, 1.0), (one.b, one.scale)):
                tensor = tensor_of(entry, self._body[entry.start : entry.stop])
                converted(entry, tensor, scale, self._pages.dtype)

    def _pack(self, one: LoraMatrices) -> None:
        place = self._layout.placements[one.linear]
        layer = self._pages_offset + one.layer * self._layout.layer_elements
        a = layer + place.a_offset + one.index * RANK_PAGE_ROWS * place.a_pitch
        b = layer + place.b_offset + place.b_columns[one.index]
        width, out = place.linear.in_features, place.linear.slices[one.index].out_features
        self._put(one.a, one.rank, width, (width, 1), 1.0, a, place.a_pitch)
        self._put(one.b, one.rank, out, (1, one.rank), one.scale, b, place.b_pitch)

    def _put(
        self,
        entry: TensorEntry,
        rank: int,
        width: int,
        strides: tuple[int, int],
        scale: float,
        offset: int,
        pitch: int,
    ) -> None:
        """Writes rows [rank, width] times the scale.

        strides: of a row and a column in the file. offset, pitch: where the first row begins in the first
        page, and from one row of a page to the next. All in elements.

        One call of torch for each view: they hold the GIL, which running streams feel.
        """
        row, column = strides
        source, start = self._source(entry)
        page = self._layout.page_elements
        full, rest = divmod(rank, RANK_PAGE_ROWS)
        if full:
            shape = (full, RANK_PAGE_ROWS, width)
            rows = source.as_strided(shape, (RANK_PAGE_ROWS * row, row, column), start)
            _scale_into(self._pages.as_strided(shape, (page, pitch, 1), offset), rows, scale)
        if rest:
            rows = source.as_strided((rest, width), strides, start + full * RANK_PAGE_ROWS * row)
            _scale_into(self._pages.as_strided((rest, width), (pitch, 1), offset + full * page), rows, scale)

    def _source(self, entry: TensorEntry) -> tuple[Tensor, int]:
        """A tensor of the entry's dtype, and the element of its storage that the entry begins at."""
        start, odd = divmod(self._body_offset + entry.start, entry.dtype.itemsize)
        if odd:
            return self._body[entry.start : entry.stop].clone().view(entry.dtype), 0
        return self._storages[entry.dtype], start


def _scale_into(target: Tensor, source: Tensor, scale: float) -> None:
    """target = source * scale, computed in float32 and rounded once. A number multiplies 16-bit tensors in
    float32 on a CPU."""
    if source.dtype == target.dtype:
        target.copy_(source)
        if scale != 1.0:
            target.mul_(scale)
    else:
        target.copy_(source.float().mul(scale))


def ranks_of(matrices: Sequence[LoraMatrices], layout: RankPageLayout) -> Ranks:
    """The rank of each adaptable matrix, [num_layers][slices_per_layer]."""
    ranks = [[0] * layout.slices_per_layer for _ in range(layout.num_layers)]
    for one in matrices:
        ranks[one.layer][layout.placements[one.linear].first_slice + one.index] = one.rank
    return ranks
