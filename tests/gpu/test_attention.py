"""Attention over pages on the GPU, against float32 products over each sequence's own keys.

Tolerances are absolute, for outputs that are means of values of unit variance: 1e-5 in float32, where only
the order of sums differs; 2e-2 in bfloat16 and 3e-3 in float16, where weights and outputs are rounded to 8
and 11 bits, and outputs over few keys are as large as the values, up to 5.
"""

import random

import pytest
import torch

from deltaplane_kernels.attention import (
    AttentionPlan,
    FixedPlan,
    TokenRun,
    paged_attention,
    rotary_write_kv,
)
from deltaplane_kernels.attention_index import IndexBuffer
from paged_cases import PagedCase, fixed_plan, make_case, reference

GPU = torch.device("cuda")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEADS = [(8, 4, 128), (2, 7, 64), (4, 1, 96), (1, 8, 256), (3, 3, 64), (1, 20, 128)]
"""KV heads, query heads for each of them, head size."""
DTYPES = list(TOLERANCES)


def check(case: PagedCase, window: int | None) -> None:
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[window], dtype=case.kv.dtype, device=GPU)
    out = paged_attention(case.queries, case.kv, plan, window)
    assert out.dtype == case.kv.dtype
    check_rows(out, case, window)


def check_rows(out: torch.Tensor, case: PagedCase, window: int | None) -> None:
    expected = reference(case.queries, case.kv, case.runs, window)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=TOLERANCES[case.kv.dtype])


def llama(spans: list[tuple[int, int]]) -> PagedCase:
    """With the heads of Llama-3-8B."""
    return make_case(spans, num_kv_heads=8, group=4, head_dim=128, dtype=torch.bfloat16, device=GPU)


def decodes(count: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    return [(chance.choice([0, 15, 16, chance.randrange(longest), longest]), 1) for _ in range(count)]


@pytest.fixture(autouse=True)
def float32_reference() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), HEADS)
def test_shapes_of_heads(num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    spans = [(0, 1), (70, 1), (1000, 1), (0, 5), (9, 12), (130, 150), (0, 300)]
    case = make_case(
        spans, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, dtype=dtype, device=GPU
    )
    for window in (None, 100):
        check(case, window)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 33, 64, 133, 256])
def test_batches_of_decodes(batch: int) -> None:
    spans = decodes(batch, 700)
    check(llama(spans), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), HEADS)
def test_decodes_that_fill_the_device(
    num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    spans = decodes(300 // num_kv_heads, 300)
    case = make_case(
        spans, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, dtype=dtype, device=GPU
    )
    for window in (None, 100):
        check(case, window)


@pytest.mark.parametrize("window", [1, 16, 100, 4096, 100_000])
def test_windows(window: int) -> None:
    spans = [(5, 1), (63, 1), (5000, 1), (0, 200), (1000, 77), (4090, 300)]
    case = make_case(spans, num_kv_heads=2, group=4, head_dim=128, dtype=torch.bfloat16, device=GPU)
    check(case, window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_contexts(dtype: torch.dtype) -> None:
    spans = [(8191, 1), (8000, 1), (3, 1), (7900, 292), (0, 2000)]
    check(make_case(spans, num_kv_heads=2, group=4, head_dim=128, dtype=dtype, device=GPU), None)


def test_one_long_decode_alone() -> None:
    check(llama([(8190, 1)]), None)


def test_one_prefill_beside_many_decodes() -> None:
    spans = [*decodes(40, 500), (0, 1999), *decodes(23, 500, seed=1)]
    check(llama(spans), None)


def test_the_same_batch_gives_the_same_bits() -> None:
    case = make_case(
        [*decodes(5, 3000), (40, 500)],
        num_kv_heads=8,
        group=4,
        head_dim=128,
        dtype=torch.bfloat16,
        device=GPU,
    )
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=case.kv.dtype, device=GPU)
    first = paged_attention(case.queries, case.kv, plan)
    for _ in range(50):
        assert torch.equal(paged_attention(case.queries, case.kv, plan), first)


def test_refuses_a_window_that_is_not_planned() -> None:
    case = make_case([(3, 1)], head_dim=64, device=GPU)
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=case.kv.dtype, device=GPU)
    with pytest.raises(KeyError):
        paged_attention(case.queries, case.kv, plan, window=8)


def captured(
    plan: FixedPlan, case: PagedCase, window: int | None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """A graph of attention under a plan that is empty; its queries and its output."""
    queries = torch.full((plan.num_tokens, *case.queries.shape[1:]), torch.nan, device=GPU).to(case.kv.dtype)
    paged_attention(queries, case.kv, plan, window)  # compiles, and makes the workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(queries, case.kv, plan, window)
    return graph, queries, out


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_rows", [1, 5, 64, 256])
def test_a_graph_of_decodes_serves_other_lengths_than_at_capture(num_rows: int, window: int | None) -> None:
    """The pages of all steps are of one case, which stands still; steps take sequences of it."""
    longest = 8000 if num_rows < 64 else 900
    case = llama(decodes(num_rows, longest))
    plan = fixed_plan(num_rows, num_rows, longest // 16 + 1, case.layout, window, GPU, decodes_alone=True)
    graph, queries, out = captured(plan, case, window)

    for seed in range(4):
        chance = random.Random(seed)
        picked = chance.sample(range(num_rows), chance.randint(1, num_rows))
        runs = [TokenRun(chance.randint(0, case.runs[i].start), 1, case.runs[i].pages) for i in picked]
        queries[: len(picked)] = case.queries[picked]
        plan.fill(runs)
        out.fill_(torch.nan)
        graph.replay()
        expected = reference(queries[: len(picked)], case.kv, runs, window)
        torch.testing.assert_close(out[: len(picked)].float(), expected, rtol=0, atol=2e-2)
        assert not out[len(picked) :].any()


@pytest.mark.parametrize("num_rows", [1, 16, 33, 64, 256])
def test_decodes_in_a_graph_see_the_token_that_the_kernel_ahead_has_written(num_rows: int) -> None:
    """Attention starts, and reads older keys, while the step's own are still being written."""
    case = llama(decodes(num_rows, 100))
    plan = fixed_plan(num_rows, num_rows, 7, case.layout, None, GPU, decodes_alone=True)
    plan.fill(case.runs)
    heads = case.packed.clone()
    queries = heads[:, : -2 * case.layout.num_heads]
    cos, sin = (torch.randn(num_rows, 1, 128, device=GPU).to(heads.dtype) for _ in range(2))

    def step() -> torch.Tensor:
        rotary_write_kv(heads, cos, sin, case.kv, plan)
        return paged_attention(queries, case.kv, plan)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(20):
        heads.normal_()
        graph.replay()
        check_rows(out, PagedCase(case.layout, case.runs, case.kv, heads), None)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_rows", [64, 256, 1024])
def test_a_graph_of_mixed_steps_serves_any_mix(num_rows: int, window: int | None) -> None:
    """Random ones of decodes and chunks, decodes alone, one chunk alone, one token, and a step of no padding;
    out of a case whose pages stand still."""
    most, longest = 48, 4000
    case = llama([(longest - num_rows, num_rows)] * most)
    plan = fixed_plan(num_rows, most, longest // 16, case.layout, window, GPU)
    graph, queries, out = captured(plan, case, window)

    for seed, counts in enumerate(
        [
            *(mixed_counts(num_rows, most, seed) for seed in range(6)),
            [1] * most,
            [num_rows - 9],
            [1],
            [num_rows],
        ]
    ):
        chance = random.Random(seed)
        runs = [
            TokenRun(chance.choice([0, 15, chance.randrange(longest - count)]), count, run.pages)
            for count, run in zip(counts, chance.sample(case.runs, len(counts)), strict=True)
        ]
        num_tokens = sum(counts)
        queries[:num_tokens] = case.queries[:num_tokens]
        queries[num_tokens:] = torch.nan
        plan.fill(runs)
        out.fill_(torch.nan)
        graph.replay()
        expected = reference(queries[:num_tokens], case.kv, runs, window)
        torch.testing.assert_close(out[:num_tokens].float(), expected, rtol=0, atol=2e-2)
        assert not out[num_tokens:].any()


def mixed_counts(num_tokens: int, most: int, seed: int) -> list[int]:
    """The tokens of each of at most `most` sequences, num_tokens or fewer in all, in any order."""
    chance = random.Random(seed)
    counts: list[int] = []
    while len(counts) < most and (left := num_tokens - sum(counts)) > 0:
        counts.append(1 if chance.random() < 0.5 else chance.randint(1, left))
    chance.shuffle(counts)
    return counts


def test_a_graph_of_a_mixed_step_gives_the_bits_of_one_that_is_not_captured() -> None:
    """Of chunks: their tiles are the same. The splits of decodes follow their number, too."""
    case = llama([(500, 1), (40, 1), (0, 100), (333, 77)])
    plan = fixed_plan(256, 8, 40, case.layout, None, GPU)
    graph, queries, out = captured(plan, case, None)
    queries[: len(case.queries)] = case.queries
    plan.fill(case.runs)
    graph.replay()
    eager = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=case.kv.dtype, device=GPU)
    expected = paged_attention(case.queries, case.kv, eager)
    assert torch.equal(out[2 : len(expected)], expected[2:])
    torch.testing.assert_close(out[:2], expected[:2], rtol=0, atol=1e-2)


def test_steps_of_several_sizes_may_be_filled_before_those_before_them_have_run() -> None:
    case = llama(decodes(8, 2000))
    buffer = IndexBuffer(
        8, 8, 126, decodes_alone=True, page_size=16, num_kv_heads=case.layout.num_heads, device=GPU
    )
    plans = {rows: FixedPlan(rows, buffer, layout=case.layout, windows=[None]) for rows in (4, 8)}
    outs = []
    for step in range(20):
        rows = 8 - step % 8
        plan = plans[8 if rows > 4 else 4]
        plan.fill(case.runs[step % 8 :])
        queries = torch.zeros(plan.num_tokens, *case.queries.shape[1:], device=GPU, dtype=case.kv.dtype)
        queries[:rows] = case.queries[:rows]
        outs.append(paged_attention(queries, case.kv, plan))
    for step, out in enumerate(outs):
        rows = 8 - step % 8
        runs = case.runs[step % 8 :]
        expected = reference(case.queries[:rows], case.kv, runs, None)
        torch.testing.assert_close(out[:rows].float(), expected, rtol=0, atol=2e-2)
