"""Attention over pages against a loop over tokens and heads in float64."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from deltaplane_kernels.attention import (
    AttentionPlan,
    KVLayout,
    TokenRun,
    paged_attention,
    rotary_write_kv,
    write_kv,
)
from deltaplane_kernels.rotary import apply_rotary, rotary_factors
from paged_cases import fixed_plan

CPU = torch.device("cpu")
PAGE = 16


@dataclass
class Case:
    """Sequences with a cached context, and the tokens of a step that follow it.

    pages: of three layers, with the contexts in the middle one; NaN in the others, and in pages of nobody.
    queries: [T, Hq, D].  keys_values: [T, 2 * Hkv, D].
    histories: of each sequence, its keys and values including the step's own, [tokens, 2, Hkv, D].
    """

    layout: KVLayout
    runs: list[TokenRun]
    pages: torch.Tensor
    queries: torch.Tensor
    keys_values: torch.Tensor
    histories: list[torch.Tensor]

    @property
    def kv(self) -> torch.Tensor:
        return self.pages[:, 1]


def make_case(
    spans: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """spans: (context, new tokens) of each sequence."""
    torch.manual_seed(0)
    layout = KVLayout(3, num_kv_heads, PAGE, head_dim)
    sizes = [-(-(context + new) // PAGE) for context, new in spans]
    free = list(range(sum(sizes) + 3))
    random.Random(0).shuffle(free)
    cache = torch.full((len(free), 3, 2, num_kv_heads, PAGE, head_dim), torch.nan, dtype=dtype)
    kv = cache[:, 1]
    runs, histories = [], []
    for (context, new), size in zip(spans, sizes, strict=True):
        pages = [free.pop() for _ in range(size)]
        kv[pages] = 7.0  # slots that are not written yet hold something finite
        history = torch.randn(context + new, 2, num_kv_heads, head_dim).to(dtype)
        for position in range(context):
            kv[pages[position // PAGE], :, :, position % PAGE] = history[position]
        runs.append(TokenRun(context, new, pages))
        histories.append(history)
    num_tokens = sum(new for _, new in spans)
    return Case(
        layout,
        runs,
        cache,
        torch.randn(num_tokens, num_kv_heads * group, head_dim).to(dtype),
        torch.cat([h[run.start :] for run, h in zip(runs, histories, strict=True)]).flatten(1, 2),
        histories,
    )


def attend(case: Case, window: int | None) -> torch.Tensor:
    plan = AttentionPlan(
        case.runs, layout=case.layout, windows=[None, window], dtype=case.kv.dtype, device=CPU
    )
    write_kv(case.kv, case.keys_values, plan)
    return paged_attention(case.queries, case.kv, plan, window)


def reference(case: Case, window: int | None) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    for run, history in zip(case.runs, case.histories, strict=True):
        keys, values = history.double().unbind(1)
        for position in range(run.start, run.end):
            first = 0 if window is None else max(0, position - window + 1)
            query = case.queries[len(rows)].double()
            heads = []
            for head in range(query.shape[0]):
                kv_head = head * case.layout.num_heads // query.shape[0]
                scores = keys[first : position + 1, kv_head] @ query[head] / case.layout.head_dim**0.5
                heads.append(scores.softmax(0) @ values[first : position + 1, kv_head])
            rows.append(torch.cat(heads))
    return torch.stack(rows)


DECODES = [(0, 1), (1, 1), (15, 1), (16, 1), (31, 1), (100, 1), (130, 1), (300, 1)]
CHUNKS = [(0, 5), (0, 16), (0, 37), (3, 30), (16, 17), (50, 2), (129, 40)]


@pytest.mark.parametrize("window", [None, 1, 7, 16, 100, 1000])
@pytest.mark.parametrize(
    "spans",
    [DECODES[:1], DECODES[5:6], DECODES, CHUNKS[:1], CHUNKS[3:4], CHUNKS, DECODES + CHUNKS, CHUNKS + DECODES],
    ids=["first", "decode", "decodes", "prefill", "chunk", "chunks", "mixed", "mixed-prefill-first"],
)
def test_equals_the_loop(spans: list[tuple[int, int]], window: int | None) -> None:
    case = make_case(spans)
    out = attend(case, window)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), reference(case, window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (1, 8), (3, 1), (4, 2)])
def test_shapes_of_heads(num_kv_heads: int, group: int, head_dim: int) -> None:
    case = make_case([(20, 1), (5, 1), (9, 12)], num_kv_heads=num_kv_heads, group=group, head_dim=head_dim)
    torch.testing.assert_close(attend(case, None).double(), reference(case, None), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = make_case([(20, 1), (150, 1), (9, 12)], dtype=dtype)
    out = attend(case, None)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), reference(case, None), rtol=0, atol=2e-2)


def test_reads_queries_out_of_packed_rows() -> None:
    case = make_case(DECODES + CHUNKS)
    packed = torch.cat((case.queries, case.keys_values), dim=1)
    expected = attend(case, None)
    num_heads = case.queries.shape[1]
    case.queries, case.keys_values = packed[:, :num_heads], packed[:, num_heads:]
    assert torch.equal(attend(case, None), expected)


def test_writes_each_token_to_its_own_place_alone() -> None:
    layout = KVLayout(3, 2, PAGE, 16)
    pages = torch.zeros(4, 3, 2, 2, PAGE, 16)
    runs = [TokenRun(14, 4, [2, 0]), TokenRun(3, 1, [3])]
    places = [(2, 14), (2, 15), (0, 0), (0, 1), (3, 3)]
    keys_values = torch.randn(5, 4, 16)
    plan = AttentionPlan(runs, layout=layout, windows=[None], dtype=torch.float32, device=CPU)

    write_kv(pages[:, 1], keys_values, plan)

    expected = torch.zeros_like(pages)
    for (page, slot), heads in zip(places, keys_values, strict=True):
        expected[page, 1, :, :, slot] = heads.view(2, 2, 16)
    assert torch.equal(pages, expected)


def test_turns_and_writes_as_one_after_the_other() -> None:
    case = make_case([(14, 4), (3, 1)])
    packed = torch.cat((case.queries, case.keys_values), dim=1)
    cos, sin = rotary_factors(torch.tensor([14, 15, 16, 17, 3]), torch.rand(8), 1.0, torch.float32)
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=torch.float32, device=CPU)
    expected, expected_pages = packed.clone(), case.pages.clone()
    apply_rotary(expected[:, :8], cos, sin)
    write_kv(expected_pages[:, 1], expected[:, 6:], plan)

    rotary_write_kv(packed, cos, sin, case.kv, plan)

    assert torch.equal(packed[:, :6], expected[:, :6])
    torch.testing.assert_close(case.pages, expected_pages, rtol=0, atol=0, equal_nan=True)


def test_a_decode_plan_refuses_what_it_has_no_room_for() -> None:
    plan = fixed_plan(2, 2, 3, KVLayout(1, 2, PAGE, 16), None, CPU, decodes_alone=True)
    plan.fill([TokenRun(40, 1, [0, 1, 2])])
    with pytest.raises(ValueError, match="3 tokens of 3 runs do not fit a plan of 2 rows and 2 runs"):
        plan.fill([TokenRun(0, 1, [i]) for i in range(3)])
    with pytest.raises(ValueError, match="2 tokens and 1 pages is not a decode of at most 3 pages"):
        plan.fill([TokenRun(0, 2, [0])])
    with pytest.raises(ValueError, match="1 tokens and 4 pages is not a decode of at most 3 pages"):
        plan.fill([TokenRun(0, 1, [0, 1, 2, 3])])
    with pytest.raises(ValueError, match="1 pages of 16 tokens do not hold 17 tokens"):
        plan.fill([TokenRun(16, 1, [0])])


def test_a_plan_of_mixed_steps_refuses_what_it_has_no_room_for() -> None:
    plan = fixed_plan(8, 2, 3, KVLayout(1, 2, PAGE, 16), None, CPU)
    plan.fill([TokenRun(40, 1, [0, 1, 2]), TokenRun(0, 7, [3])])
    with pytest.raises(ValueError, match="9 tokens of 2 runs do not fit a plan of 8 rows and 2 runs"):
        plan.fill([TokenRun(40, 1, [0, 1, 2]), TokenRun(0, 8, [3])])
    with pytest.raises(ValueError, match="3 tokens of 3 runs do not fit a plan of 8 rows and 2 runs"):
        plan.fill([TokenRun(0, 1, [i]) for i in range(3)])
    with pytest.raises(ValueError, match="2 tokens and 4 pages is not a run of at most 3 pages"):
        plan.fill([TokenRun(0, 2, [0, 1, 2, 3])])
    with pytest.raises(ValueError, match="1 pages of 16 tokens do not hold 18 tokens"):
        plan.fill([TokenRun(16, 2, [0])])


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    together = make_case(DECODES)
    out = attend(together, None)
    for row, run in enumerate(together.runs):
        plan = AttentionPlan([run], layout=together.layout, windows=[None], dtype=torch.float32, device=CPU)
        alone = paged_attention(together.queries[row : row + 1], together.kv, plan)
        torch.testing.assert_close(alone[0], out[row], rtol=0, atol=1e-6)


def test_a_row_reads_its_own_pages_alone() -> None:
    case = make_case(DECODES + CHUNKS)
    out = attend(case, None)
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=torch.float32, device=CPU)
    row = 0
    for run in case.runs:
        others = [page for other in case.runs if other is not run for page in other.pages]
        poisoned = case.pages.clone()
        poisoned[others] = torch.nan
        rows = slice(row, row + run.num_tokens)
        assert torch.equal(paged_attention(case.queries, poisoned[:, 1], plan)[rows], out[rows])
        row += run.num_tokens


def test_one_long_sequence_does_not_pad_the_short_ones() -> None:
    case = make_case([(2000, 1)] + [(20, 1)] * 7)
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=torch.float32, device=CPU)
    rows_of_a_page = 2 * case.layout.num_heads
    gathered = sum(group.gather.numel() for group in plan.groups[None]) // rows_of_a_page
    assert gathered == 126 + 7 * 2


def test_a_window_gathers_its_own_pages_alone() -> None:
    case = make_case([(2000, 1), (1000, 40)])
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[32], dtype=torch.float32, device=CPU)
    rows_of_a_page = 2 * case.layout.num_heads
    assert [group.gather.numel() // rows_of_a_page for group in plan.groups[32]] == [3, 5]


def test_refuses_pages_that_do_not_reach_the_end() -> None:
    run = TokenRun(start=30, num_tokens=3, pages=[0, 1])
    with pytest.raises(ValueError, match="2 pages of 16 tokens do not hold 33 tokens"):
        AttentionPlan([run], layout=KVLayout(1, 2, PAGE, 16), windows=[None], dtype=torch.float32, device=CPU)


def test_refuses_a_window_that_is_not_planned() -> None:
    case = make_case([(3, 1)])
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=torch.float32, device=CPU)
    with pytest.raises(KeyError):
        paged_attention(case.queries, case.kv, plan, window=8)


def test_refuses_pages_that_lie_otherwise_in_memory() -> None:
    case = make_case([(3, 1)])
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=torch.float32, device=CPU)
    for kv in (case.kv.clone(), case.pages[:, 1, :, :1], case.pages[:, 1, :, :, :8]):
        with pytest.raises(ValueError, match="is not a layer of pages of KVLayout"):
            paged_attention(case.queries, kv, plan)
        with pytest.raises(ValueError, match="is not a layer of pages of KVLayout"):
            write_kv(kv, case.keys_values, plan)
