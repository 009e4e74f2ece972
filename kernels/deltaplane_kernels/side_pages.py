"""Where lies what an adapter has outside the linears of the layers: in side pages.

Side pages are pages of the same pool as rank pages, of the same size, behind the rank pages of their adapter.
They hold blocks of rows, of those parts alone that the adapter has:

    head B        [head_rank, V]           embedding A   [embedding_rank, V]
    head A        [head_rank, H]           embedding B   [embedding_rank, H]
    table         [V, H]                   norms         [1, sum of their sizes]

V and H are the sizes of the vocabulary and of the hidden state; B is transposed, with the scale folded in.
The table is a trained embedding table, the norms are trained weights of norms.

A block is a list of rows over pages: rows of one width, at multiples of their pitch, none in two pages. So
one number places a whole block: row r is row first + r of the pages, counted in rows of this pitch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, OutsideLayers
from deltaplane_kernels.rank_pages import ALIGNMENT, RankPageLayout


@dataclass(frozen=True, slots=True)
class SideShape:
    """What an adapter has outside the layers' linears.

    head_rank, embedding_rank: of LoRA on the head and on the embedding; 0 where there is none.
    has_table: whether it has an embedding table of its own.
    norms: paths of the norms whose weights it has, in the order of OutsideLayers.norms.
    """

    head_rank: int = 0
    embedding_rank: int = 0
    has_table: bool = False
    norms: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether it has anything there."""
        return bool(self.head_rank or self.embedding_rank or self.has_table or self.norms)


NOTHING = SideShape()
"""Of an adapter of the layers' linears alone."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one width over side pages.

    first: the place of row 0, in rows of this pitch from the start of the first side page.
    pitch: elements from one row to the next. rows_per_page: rows of this pitch that a page has room for.
    """

    first: int
    num_rows: int
    width: int
    pitch: int
    rows_per_page: int

    def place(self, row: int) -> tuple[int, int]:
        """The side page of a row, and the element there at which it starts."""
        page, index = divmod(self.first + row, self.rows_per_page)
        return page, index * self.pitch

    def runs(self, pages: Tensor, side_pages: Sequence[int]) -> Iterator[Tensor]:
        """Views of all rows in order, [n, width] of each page: pages [num_pages, page_elements] has them in
        the pages that side_pages names."""
        row = 0
        while row < self.num_rows:
            page, start = self.place(row)
            count = min(self.num_rows - row, self.rows_per_page - start // self.pitch)
            run = pages[side_pages[page]].narrow(0, start, count * self.pitch)
            yield run.view(count, self.pitch).narrow(1, 0, self.width)
            row += count


@dataclass(frozen=True, slots=True)
class SidePlacement:
    """Where the parts of a SideShape lie; None for those it lacks.

    norms: of each norm that it has, where its weights start in the row of the block `norm_row`.
    """

    num_pages: int = 0
    head_a: RowBlock | None = None
    head_b: RowBlock | None = None
    embedding_a: RowBlock | None = None
    embedding_b: RowBlock | None = None
    table: RowBlock | None = None
    norm_row: RowBlock | None = None
    norms: Mapping[str, int] = field(default_factory=dict)


class SidePageLayout:
    """Places the parts of adapters in pages of page_elements."""

    def __init__(self, outside: OutsideLayers, page_elements: int) -> None:
        self.outside = outside
        self.page_elements = page_elements

    def most_pages(self, max_rank: int) -> int:
        """Of an adapter of ranks up to max_rank."""
        holds_rank_rows = _aligned(self.outside.vocab_size) <= self.page_elements
        rank = max_rank if holds_rank_rows else 0
        everything = SideShape(rank, rank, has_table=True, norms=tuple(self.outside.norms))
        return self.place(everything).num_pages

    def place(self, shape: SideShape) -> SidePlacement:
        """Errors: ValueError where a page does not hold one row of a part."""
        vocab, hidden = self.outside.vocab_size, self.outside.hidden_size
        starts, norms_size = {}, 0
        for norm in shape.norms:
            starts[norm] = norms_size
            norms_size += _aligned(self.outside.norms[norm])
        stack = _Stack(self.page_elements)
        return SidePlacement(
            head_b=stack.put(shape.head_rank, vocab),
            embedding_a=stack.put(shape.embedding_rank, vocab),
            head_a=stack.put(shape.head_rank, hidden),
            embedding_b=stack.put(shape.embedding_rank, hidden),
            table=stack.put(vocab if shape.has_table else 0, hidden),
            norm_row=stack.put(1 if norms_size else 0, norms_size),
            norms=starts,
            num_pages=stack.num_pages,
        )


def side_page_layout(layout: AdapterLayout) -> SidePageLayout | None:
    """In pages of the size of rank pages; None where the layout has nothing outside the linears."""
    if layout.outside is None:
        return None
    return SidePageLayout(layout.outside, RankPageLayout(layout).page_elements)


class _Stack:
    """Blocks one behind the other."""

    def __init__(self, page_elements: int) -> None:
        self._page_elements = page_elements
        self._page, self._element = 0, 0

    def put(self, num_rows: int, width: int) -> RowBlock | None:
        if not num_rows:
            return None
        pitch = _aligned(width)
        rows_per_page = self._page_elements // pitch
        if not rows_per_page:
            raise ValueError(f"a row of {width} does not fit in a page of {self._page_elements} elements")
        first = self._page * rows_per_page + min(-(-self._element // pitch), rows_per_page)
        block = RowBlock(first, num_rows, width, pitch, rows_per_page)
        self._page, start = block.place(num_rows - 1)
        self._element = start + pitch
        return block

    @property
    def num_pages(self) -> int:
        return self._page + 1 if self._element else 0


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
