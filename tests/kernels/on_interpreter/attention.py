"""The attention kernels on Triton's interpreter; test_ops_triton.py runs this file."""

from dataclasses import replace

import pytest
import torch

from deltaplane_kernels import attention_index
from deltaplane_kernels.attention import TokenRun
from deltaplane_kernels.attention_gpu import paged_attention
from deltaplane_kernels.attention_index import (
    AttentionIndex,
    DecodeWorkspace,
    IndexBuffer,
    Splits,
    build_index,
)
from paged_cases import PAGE, PagedCase, make_case, reference

CPU = torch.device("cpu")
DECODES = [(0, 1), (15, 1), (16, 1), (100, 1), (300, 1)]
CHUNKS = [(0, 5), (3, 30), (16, 17), (129, 40)]


def index_of(case: PagedCase, splits: Splits | None = None) -> AttentionIndex:
    index = build_index(case.runs, page_size=PAGE, num_kv_heads=case.layout.num_heads, device=CPU)
    if splits is None:
        return index
    programs = index.max_decodes * splits.count
    workspace = DecodeWorkspace(index.workspace.counters, programs)
    return replace(index, splits=splits, decode_programs=programs, workspace=workspace)


def counted(index: AttentionIndex, splits: Splits) -> AttentionIndex:
    """The same, with the number of decodes and their splits read from its counts."""
    index.counts[1:3] = torch.tensor([splits.count, splits.min_keys])
    return replace(index, splits=None)


def buffer_of(
    max_rows: int, max_sequences: int, max_pages: int, *, decodes_alone: bool = False
) -> IndexBuffer:
    return IndexBuffer(
        max_rows,
        max_sequences,
        max_pages,
        decodes_alone=decodes_alone,
        page_size=PAGE,
        num_kv_heads=2,
        device=CPU,
    )


def check(case: PagedCase, index: AttentionIndex, window: int | None, atol: float = 1e-5) -> None:
    out = paged_attention(case.queries, case.kv, index, window)
    assert out.dtype == case.kv.dtype
    expected = reference(case.queries, case.kv, case.runs, window)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)
    assert not index.workspace.counters.any()


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("splits", [Splits(1, 32, False), Splits(4, 32, True), Splits(32, 64, True)], ids=str)
def test_decodes(splits: Splits, window: int | None) -> None:
    case = make_case(DECODES)
    index = index_of(case, splits)
    check(case, index, window)
    check(case, counted(index, splits), window)


@pytest.mark.parametrize("window", [None, 1, 40])
def test_chunks(window: int | None) -> None:
    case = make_case(CHUNKS)
    check(case, index_of(case), window)


def test_decodes_between_chunks() -> None:
    case = make_case([CHUNKS[1], DECODES[3], CHUNKS[0], DECODES[1], DECODES[0]])
    check(case, index_of(case), None)


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim"), [(1, 1, 64), (2, 7, 96), (1, 20, 128), (1, 40, 32), (1, 2, 256)]
)
def test_shapes_of_heads(num_kv_heads: int, group: int, head_dim: int) -> None:
    case = make_case([(70, 1), (9, 12)], num_kv_heads=num_kv_heads, group=group, head_dim=head_dim)
    check(case, index_of(case, Splits(2, 32, True)), None)


def test_float16() -> None:
    case = make_case([(150, 1), (9, 70), (130, 1)], dtype=torch.float16)
    check(case, index_of(case, Splits(2, 64, True)), None, atol=2e-3)


def check_filled(case: PagedCase, index: AttentionIndex, num_rows: int, window: int | None) -> None:
    """Queries of padding are NaN, and what the output held before, too."""
    num_tokens = len(case.queries)
    queries = torch.full((num_rows, *case.queries.shape[1:]), torch.nan)
    queries[:num_tokens] = case.queries
    out = torch.full((num_rows, queries.shape[1] * queries.shape[2]), torch.nan)
    paged_attention(queries, case.kv, index, window, out)
    expected = reference(case.queries, case.kv, case.runs, window)
    torch.testing.assert_close(out[:num_tokens], expected, rtol=0, atol=1e-5)
    assert not out[num_tokens:].any()
    assert not index.workspace.counters.any()


def test_one_buffer_serves_decodes_step_after_step() -> None:
    buffer = buffer_of(4, 4, 20, decodes_alone=True)
    for spans in ([(40, 1)], DECODES[1:], [(3, 1), (290, 1), (16, 1)]):
        case = make_case(spans)
        buffer.fill(case.runs, 4)
        check_filled(case, buffer.index(4), 4, None)


@pytest.mark.parametrize("window", [None, 40])
def test_one_buffer_serves_mixed_steps_of_several_sizes(window: int | None) -> None:
    """Without room to spare, with one row of it, and with more than a tile; decodes and chunks alone."""
    buffer = buffer_of(128, 9, 20)
    for num_rows, spans in [
        (128, [*DECODES, *CHUNKS[:3]]),
        (97, [*DECODES, *CHUNKS]),
        (128, CHUNKS[-1:]),
        (41, CHUNKS[-1:]),
        (8, DECODES),
        (1, DECODES[-1:]),
        (2, [(17, 2)]),
        (96, [DECODES[2], (0, 95)]),
    ]:
        case = make_case(spans)
        buffer.fill(case.runs, num_rows)
        check_filled(case, buffer.index(num_rows), num_rows, window)


@pytest.mark.parametrize("num_rows", [1, 2, 100])
def test_a_step_of_padding_alone_gives_zeros(num_rows: int) -> None:
    buffer, kv = buffer_of(128, 9, 20), torch.full((3, 2, 2, PAGE, 16), torch.nan)
    buffer.fill([], num_rows)
    queries, out = torch.full((num_rows, 6, 16), torch.nan), torch.full((num_rows, 96), torch.nan)
    assert not paged_attention(queries, kv, buffer.index(num_rows), None, out).any()


def test_a_buffer_has_room_for_the_programs_of_any_number_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_index, "processors", lambda device: 132)
    buffer = buffer_of(64, 48, 20)
    most = buffer.index(64).decode_programs
    needed = []
    for num_decodes in range(1, 49):
        buffer.fill([TokenRun(0, 1, [0])] * num_decodes, 64)
        decodes, splits, _, prefills, _ = buffer.index(64).counts.tolist()
        assert (decodes, prefills) == (num_decodes, 1)
        needed.append(decodes * splits)
    assert max(needed) == most > needed[-1]


def test_queries_may_lie_otherwise_in_memory() -> None:
    case = make_case([(40, 1), (3, 9)])
    index = index_of(case)
    expected = paged_attention(case.queries, case.kv, index)
    for queries in (case.queries.transpose(0, 1).contiguous().transpose(0, 1), case.queries.contiguous()):
        assert torch.equal(paged_attention(queries, case.kv, index), expected)


def test_refuses_queries_that_do_not_fit() -> None:
    case = make_case([(40, 1), (3, 9)])
    for queries in (case.queries[:9], case.queries[:, :5], case.queries[..., :8], case.queries.half()):
        with pytest.raises(RuntimeError, match="does not fit 10 tokens"):
            paged_attention(queries, case.kv, index_of(case))


def test_index_of_a_mixed_step() -> None:
    runs = [TokenRun(14, 4, [2, 0]), TokenRun(3, 1, [3]), TokenRun(0, 2, [5])]
    index = build_index(runs, page_size=PAGE, num_kv_heads=2, device=CPU)
    assert index.slots.tolist() == [46, 47, 0, 1, 51, 80, 81]
    assert index.positions.tolist() == [14, 15, 16, 17, 3, 0, 1]
    assert index.rows.tolist() == [4, 0, 5]
    assert index.starts.tolist() == [3, 14, 0]
    assert index.table_starts.tolist() == [2, 0, 3]
    assert index.first_tokens.tolist() == [0, 4, 6]
    assert index.tables.tolist() == [2, 0, 3, 5]
    assert index.counts[[0, 3, 4]].tolist() == [1, 2, 4]
    assert (index.max_prefills, index.max_prefill_tokens) == (2, 6)


def test_a_buffer_holds_the_index_of_a_step_and_a_sequence_of_padding() -> None:
    runs = [TokenRun(14, 4, [2, 0]), TokenRun(3, 1, [3]), TokenRun(0, 2, [5])]
    buffer = buffer_of(16, 3, 4)
    index = buffer.index(10)
    buffer.fill(runs, 10)
    assert index.slots.tolist() == [46, 47, 0, 1, 51, 80, 81, -1, -1, -1]
    assert index.positions.tolist() == [14, 15, 16, 17, 3, 0, 1, 0, 0, 0]
    assert index.rows.tolist() == [4, 0, 5, 7]
    assert index.starts.tolist() == [3, 14, 0, -3]
    assert index.first_tokens[:4].tolist() == [0, 4, 6, 9]
    assert index.tables[:4].tolist() == [2, 0, 3, 5]
    assert index.counts[[0, 3, 4]].tolist() == [1, 3, 4]


def test_the_mean_of_keys_is_of_decodes_that_are_there() -> None:
    buffer = buffer_of(16, 8, 70, decodes_alone=True)
    for lengths, mean in (([], 0), ([1], 1), ([1000], 1000), ([10, 20, 1000], 343)):
        buffer.fill([TokenRun(length - 1, 1, [*range(70)]) for length in lengths], 16)
        assert buffer.index(16).counts[[0, 4]].tolist() == [16, mean]
