"""Packs what an adapter has outside the linears of the layers into side pages in host memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaplane_kernels.side_pages import RowBlock, SidePageLayout
from deltaplane_server.adapters.affine import BaseWeights
from deltaplane_server.adapters.load_threads import LoadThreads
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.side_tensors import SideTensors
from deltaplane_server.adapters.tensor_values import converted, tensor_of
from deltaplane_server.adapters.unservable import shown, unservable

_COMPARED_ROWS = 4096
"""Rows of a table that are compared with the base's at once."""


ReadBytes = Callable[[int, int], Tensor]
"""Answers bytes of the file, from and up to so many after its header: uint8."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that go into one page. source: a view of the file's tensor, [n, width]."""

    target: Tensor
    source: Tensor
    entry: TensorEntry
    scale: float

    def pack(self) -> None:
        self.target.copy_(converted(self.entry, self.source, self.scale, self.target.dtype))


def pack_side(
    side: SideTensors, body: Tensor, layout: SidePageLayout, pages: Tensor, threads: LoadThreads
) -> None:
    """Writes the parts, B times its scale, into side pages [n, page_elements]. What is beside them stays.

    body: the bytes of the file after its header, uint8.
    Errors: InvalidArgumentError where a value is not finite, in the file or in the dtype of the pages.
    """
    threads.map(_Run.pack, list(_runs(side, body, layout, pages)))


def _runs(side: SideTensors, body: Tensor, layout: SidePageLayout, pages: Tensor) -> Iterator[_Run]:
    place = layout.place(side.shape)

    def runs(block: RowBlock | None, entry: TensorEntry, rows: Tensor, scale: float = 1.0) -> Iterator[_Run]:
        assert block is not None
        first = 0
        for target in block.runs(pages, range(len(pages))):
            yield _Run(target, rows[first : first + len(target)], entry, scale)
            first += len(target)

    def tensor(entry: TensorEntry) -> Tensor:
        return tensor_of(entry, body[entry.start : entry.stop])

    for lora, a, b in (
        (side.head, place.head_a, place.head_b),
        (side.embedding, place.embedding_a, place.embedding_b),
    ):
        if lora is not None:
            yield from runs(a, lora.a, tensor(lora.a))
            yield from runs(b, lora.b, tensor(lora.b).T, lora.scale)
    if side.table is not None:
        yield from runs(place.table, side.table, tensor(side.table))
    if place.norm_row is not None:
        [row] = place.norm_row.runs(pages, range(len(pages)))
        for norm, entry in side.norms:
            at = place.norms[norm]
            yield _Run(row[:, at : at + entry.shape[0]], tensor(entry)[None], entry, 1.0)


def check_tied(side: SideTensors, read: ReadBytes) -> None:
    """Errors: InvalidArgumentError where LoRA on the head is to be the embedding's, and is not."""
    if not side.is_tied or side.head is None or side.embedding is None:
        return
    for one, other in ((side.head.a, side.embedding.b), (side.head.b, side.embedding.a)):
        left, right = (tensor_of(entry, read(entry.start, entry.stop)) for entry in (one, other))
        if not torch.equal(left, right.T):
            raise unservable(
                f"{shown(one.name)} is not {shown(other.name)} transposed, as ensure_weight_tying has it"
            )


def check_base_copies(side: SideTensors, read: ReadBytes, base: BaseWeights) -> None:
    """Errors: InvalidArgumentError where a copy of a table of the base has other values."""
    for module, entry in side.base_copies:
        if not base.equals_table(module, _pieces(entry, read)):
            raise unservable(
                f"{shown(entry.name)} is not the {module} of this base: the adapter was trained for another "
                "base, or for one of which that was changed"
            )


def _pieces(entry: TensorEntry, read: ReadBytes) -> Iterator[Tensor]:
    num_rows, width = entry.shape
    row_bytes = width * entry.dtype.itemsize
    for first in range(0, num_rows, _COMPARED_ROWS):
        count = min(_COMPARED_ROWS, num_rows - first)
        start = entry.start + first * row_bytes
        yield tensor_of(replace(entry, shape=(count, width)), read(start, start + count * row_bytes))
