"""Where the parts of an adapter outside the layers lie in side pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaplane_kernels.layout import OutsideLayers
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_kernels.side_pages import NOTHING, RowBlock, SidePageLayout, SideShape, side_page_layout
from lora_cases import make_layout
from side_cases import make_outside_layout

NORMS = {"layers.0.input_layernorm": 20, "layers.0.self_attn.q_norm": 5, "norm": 20}


def blocks_of(layout: SidePageLayout, shape: SideShape) -> list[tuple[RowBlock, int, int]]:
    """The blocks with the sizes that they must have."""
    place = layout.place(shape)
    vocab, hidden = layout.outside.vocab_size, layout.outside.hidden_size
    wanted = [
        (place.head_b, shape.head_rank, vocab),
        (place.head_a, shape.head_rank, hidden),
        (place.embedding_a, shape.embedding_rank, vocab),
        (place.embedding_b, shape.embedding_rank, hidden),
        (place.table, vocab * shape.has_table, hidden),
    ]
    assert [block is not None for block, _, _ in wanted] == [rows > 0 for _, rows, _ in wanted]
    return [(block, rows, width) for block, rows, width in wanted if block is not None]


@settings(deadline=None, max_examples=200)
@given(
    vocab=st.integers(1, 60),
    hidden=st.integers(1, 40),
    room=st.integers(0, 300),
    head_rank=st.integers(0, 20),
    embedding_rank=st.integers(0, 20),
    has_table=st.booleans(),
    norms=st.sets(st.sampled_from(sorted(NORMS))),
)
def test_rows_of_all_parts_have_places_of_their_own(
    vocab: int,
    hidden: int,
    room: int,
    head_rank: int,
    embedding_rank: int,
    has_table: bool,
    norms: set[str],
) -> None:
    elements = 64 + 8 * room
    layout = SidePageLayout(OutsideLayers(vocab, hidden, NORMS), elements)
    own = tuple(norm for norm in NORMS if norm in norms)
    shape = SideShape(head_rank, embedding_rank, has_table, own)
    place = layout.place(shape)
    used = torch.zeros(place.num_pages, elements)
    for block, num_rows, width in blocks_of(layout, shape):
        runs = list(block.runs(used, range(place.num_pages)))
        assert sum(len(run) for run in runs) == num_rows
        assert {run.shape[1] for run in runs} == {width}
        for run in runs:
            run += 1
        for row in range(num_rows):
            page, start = block.place(row)
            assert start % 8 == 0
            assert start + width <= elements
            assert used[page, start : start + width].eq(1).all()
    if place.norm_row is not None:
        [row_run] = place.norm_row.runs(used, range(place.num_pages))
        for norm in own:
            assert place.norms[norm] % 8 == 0
            row_run[0, place.norms[norm] : place.norms[norm] + NORMS[norm]] += 1
    assert used.le(1).all(), "two parts share an element"
    assert bool(shape) == bool(place.num_pages)
    assert used[-1:].any() == bool(shape)


def test_small_parts_share_a_page() -> None:
    layout = side_page_layout(make_outside_layout(vocab=200, hidden=64))
    assert layout is not None
    everything = SideShape(8, 8, norms=tuple(layout.outside.norms))
    assert layout.page_elements > 2 * 8 * (200 + 64)
    assert layout.place(everything).num_pages == 1


def test_pages_are_as_many_as_the_rows_need() -> None:
    layout = SidePageLayout(OutsideLayers(100, 8, {}), 1040)
    assert layout.place(SideShape(head_rank=10)).num_pages == 2  # ten rows of 104, and behind them ten of 8
    assert layout.place(SideShape(head_rank=9)).num_pages == 1
    assert layout.place(SideShape(has_table=True)).num_pages == 1
    assert layout.place(SideShape(has_table=True, head_rank=9)).num_pages == 2
    assert layout.place(NOTHING).num_pages == 0
    assert layout.most_pages(9) == 3


def test_a_row_that_is_wider_than_a_page_is_refused() -> None:
    layout = SidePageLayout(OutsideLayers(100, 8, {}), 96)
    with pytest.raises(ValueError, match="a row of 100 does not fit in a page of 96 elements"):
        layout.place(SideShape(head_rank=1))
    assert layout.place(SideShape(has_table=True)).num_pages == 9  # the table has rows of 8
    assert layout.most_pages(256) == 9


def test_side_pages_are_as_large_as_rank_pages() -> None:
    layout = make_outside_layout()
    side = side_page_layout(layout)
    assert side is not None
    assert side.page_elements == RankPageLayout(layout).page_elements
    assert side_page_layout(make_layout()) is None
