"""Packs an adapter's matrices into rank pages in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.lora_torch import Ranks
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, RankPageLayout, rank_pages
from deltaplane_server.adapters.lora_matrices import LoraMatrices
from deltaplane_server.adapters.safetensors_header import TensorEntry
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
    result = tensor.float().mul(scale).to(dtype)
    if not result.isfinite().all():
        if not tensor.isfinite().all():
            raise unservable(f"{shown(entry.name)} has values that are NaN or infinite")
        raise unservable(f"{shown(entry.name)} has values that times the scale {scale:g} overflow {dtype}")
    return result


def pack_pages(
    matrices: Sequence[LoraMatrices],
    body: Tensor,
    layout: RankPageLayout,
    dtype: torch.dtype,
    *,
    pin_memory: bool,
) -> Tensor:
    """Rank pages [n, page_elements] with A as it is and B^T times its scale; rows above a rank are zero.

    body: the bytes of the file after its header, uint8.
    Errors: InvalidArgumentError where a value is not finite, in the file or in dtype.
    """
    num_pages = rank_pages(max(one.rank for one in matrices))
    pages = torch.zeros(num_pages, layout.page_elements, dtype=dtype, pin_memory=pin_memory)
    for one in matrices:
        a = converted(one.a, tensor_of(one.a, body[one.a.start : one.a.stop]), 1.0, dtype)
        b = converted(one.b, tensor_of(one.b, body[one.b.start : one.b.stop]), one.scale, dtype)
        _put_rows(layout.a(pages, one.layer, one.linear)[:, one.index], a)
        _put_rows(layout.b(pages, one.layer, one.linear, one.index), b.T)
    return pages


def ranks_of(matrices: Sequence[LoraMatrices], layout: RankPageLayout) -> Ranks:
    """The rank of each adaptable matrix, [num_layers][slices_per_layer]."""
    ranks = [[0] * layout.slices_per_layer for _ in range(layout.num_layers)]
    for one in matrices:
        ranks[one.layer][layout.placements[one.linear].first_slice + one.index] = one.rank
    return ranks


def _put_rows(block: Tensor, rows: Tensor) -> None:
    """Writes rows [rank, width] over the pages of block [n, 8, width]."""
    for page, chunk in enumerate(torch.split(rows, RANK_PAGE_ROWS)):
        block[page, : len(chunk)] = chunk
