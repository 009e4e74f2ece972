"""The attention kernels on Triton's interpreter; test_ops_triton.py runs this file."""

import pytest
import torch

from deltaplane_kernels.attention import TokenRun
from deltaplane_kernels.attention_index import (
    AttentionIndex,
    DecodeIndexBuffer,
    DecodeWorkspace,
    Splits,
    build_index,
)
from deltaplane_kernels.attention_triton import paged_attention
from paged_cases import PAGE, PagedCase, make_case, reference

CPU = torch.device("cpu")
DECODES = [(0, 1), (15, 1), (16, 1), (100, 1), (300, 1)]
CHUNKS = [(0, 5), (3, 30), (16, 17), (129, 40)]


def index_of(case: PagedCase, splits: Splits | None = None) -> AttentionIndex:
    index = build_index(case.runs, page_size=PAGE, num_kv_heads=case.layout.num_heads, device=CPU)
    if splits is None:
        return index
    fields = {name: getattr(index, name) for name in index.__slots__}
    workspace = DecodeWorkspace(index.workspace.counters, splits.count)
    return AttentionIndex(**(fields | {"splits": splits, "workspace": workspace}))


def check(case: PagedCase, index: AttentionIndex, window: int | None, atol: float = 1e-5) -> None:
    out = paged_attention(case.queries, case.kv, index, window)
    assert out.dtype == case.kv.dtype
    expected = reference(case.queries, case.kv, case.runs, window)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)
    assert not index.workspace.counters.any()


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("splits", [Splits(1, 32), Splits(4, 32), Splits(32, 64)], ids=str)
def test_decodes(splits: Splits, window: int | None) -> None:
    case = make_case(DECODES)
    check(case, index_of(case, splits), window)


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
    check(case, index_of(case, Splits(2, 32)), None)


def test_float16() -> None:
    case = make_case([(150, 1), (9, 70), (130, 1)], dtype=torch.float16)
    check(case, index_of(case, Splits(2, 64)), None, atol=2e-3)


def test_one_buffer_serves_step_after_step() -> None:
    buffer = DecodeIndexBuffer(4, 20, page_size=PAGE, num_kv_heads=2, device=CPU)
    for spans in ([(40, 1)], DECODES[1:], [(3, 1), (290, 1), (16, 1)]):
        case = make_case(spans)
        buffer.fill(case.runs)
        queries = torch.full((4, *case.queries.shape[1:]), torch.nan)
        queries[: len(spans)] = case.queries
        out = paged_attention(queries, case.kv, buffer.index, None)
        expected = reference(case.queries, case.kv, case.runs, None)
        torch.testing.assert_close(out[: len(spans)], expected, rtol=0, atol=1e-5)
        assert not out[len(spans) :].any()


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
    assert (index.num_decodes, index.num_prefills, index.num_prefill_tokens) == (1, 2, 6)
