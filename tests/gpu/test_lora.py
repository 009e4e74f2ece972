"""The CUDA path of the LoRA op against the plainest loop in float64, outside and inside CUDA graphs."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, LinearSlice, PackedLinear
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.lora_segments import Blend, Segments
from gpu_lora_pools import (
    BLENDS,
    DTYPES,
    MAX_BLENDS,
    MAX_TOKENS,
    MEMBERS,
    TOLERANCES,
    CopiedProduct,
    filled_pool,
    make_adapters,
    random_rows,
    same_bits,
)
from lora_cases import (
    BASE,
    MIXES,
    Adapter,
    add_delta_by_loop,
    is_touched,
    make_adapter,
    make_layout,
    make_mix,
)

BATCH_SIZES = (1, 2, 3, 7, 16, 33, 64, 133, 256)
RANKS = (1, 2, 3, 4, 8, 12, 16, 17, 32, 64, 100, 128, 256)
SMALL = make_layout()
WIDE = make_layout(num_layers=1, hidden=2056, kv=520, intermediate=4104)
"""Several splits of the input and blocks of columns, neither in whole numbers."""


def check_output(
    adapters: Sequence[Adapter],
    segments: Segments,
    layer: int,
    linear: PackedLinear,
    x: Tensor,
    before: Tensor,
    y: Tensor,
) -> None:
    """All on the CPU. What no adapter touches must keep every bit."""
    tolerance = TOLERANCES[y.dtype]
    expected = add_delta_by_loop(adapters, segments, layer, linear, x, before)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    owners = [slot for slot, count in segments for _ in range(count)]
    column = 0
    for index, part in enumerate(linear.slices):
        columns = slice(column, column + part.out_features)
        column += part.out_features
        untouched = [
            row
            for row, slot in enumerate(owners)
            if not is_touched(adapters, slot, (layer, linear.name, index))
        ]
        assert same_bits(y[untouched, columns], before[untouched, columns])


def check_step(pool: RankPagePool, adapters: Sequence[Adapter], segments: Segments) -> None:
    step = pool.step(segments)
    layout = adapters[0].layout
    if all(slot == BASE for slot, _ in segments):
        assert step is None
        return
    assert step is not None
    for layer in range(layout.num_layers):
        for linear in layout.linears:
            x = random_rows(step.num_tokens, linear.in_features, pool.pages.dtype, seed=layer)
            y = random_rows(step.num_tokens, linear.out_features, pool.pages.dtype, seed=layer + 100)
            y[:, ::3] = -0.0  # adding a zero would turn it into 0.0
            result = y.cuda()
            step.add_delta(layer, linear.name, x.cuda(), result)
            check_output(adapters, segments, layer, linear, x, y, result.cpu())


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def small(request: pytest.FixtureRequest) -> tuple[RankPagePool, list[Adapter]]:
    adapters = make_adapters(SMALL, request.param)
    return filled_pool(SMALL, adapters, request.param, MEMBERS), adapters


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def wide(request: pytest.FixtureRequest) -> tuple[RankPagePool, list[Adapter]]:
    adapters = make_adapters(WIDE, request.param)
    return filled_pool(WIDE, adapters, request.param, MEMBERS), adapters


@pytest.mark.parametrize("batch", BATCH_SIZES)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_equal_the_loop(small: tuple[RankPagePool, list[Adapter]], mix: str, batch: int) -> None:
    pool, adapters = small
    check_step(pool, adapters, make_mix(mix, batch, len(adapters), seed=batch))


@pytest.mark.parametrize("batch", [3, 33, 64])
@pytest.mark.parametrize("mix", ["distinct", "zipf", "identical"])
def test_blends_beside_adapters_and_base_rows_equal_the_loop(
    small: tuple[RankPagePool, list[Adapter]], mix: str, batch: int
) -> None:
    pool, adapters = small
    blends = BLENDS[batch % 3 :][:MAX_BLENDS]
    check_step(pool, adapters, make_mix(mix, batch, len(adapters), seed=batch, blends=blends))


@pytest.mark.parametrize("mix", ["distinct", "skewed", "identical"])
@pytest.mark.parametrize("blends", [BLENDS[:2], BLENDS[2:]])
def test_wide_linears_equal_the_loop(
    wide: tuple[RankPagePool, list[Adapter]], mix: str, blends: list[Blend]
) -> None:
    pool, adapters = wide
    check_step(pool, adapters, make_mix(mix, 33, len(adapters), seed=4, blends=blends))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_mixed_in_one_batch_equal_the_loop(dtype: torch.dtype) -> None:
    adapters = [make_adapter(WIDE, rank, seed=rank, dtype=dtype) for rank in RANKS]
    check_step(
        filled_pool(WIDE, adapters, dtype), adapters, make_mix("distinct", 2 * len(RANKS) + 1, len(adapters))
    )


@pytest.mark.parametrize("num_tokens", [17, 65, 300, 600])
def test_prefills_beside_decodes_equal_the_loop(
    small: tuple[RankPagePool, list[Adapter]], num_tokens: int
) -> None:
    pool, adapters = small
    decodes: Segments = [(0, 1), (2, 1), (BASE, 1), (BLENDS[0], 1), (0, 1), (9, 1)]
    prefills: Segments = [(2, num_tokens), (BASE, 3), (BLENDS[0], num_tokens), (6, num_tokens), (2, 1)]
    check_step(pool, adapters, [*decodes, *prefills])


def test_prefill_of_2000_tokens_beside_decodes_equals_the_loop(
    small: tuple[RankPagePool, list[Adapter]],
) -> None:
    pool, adapters = small
    check_step(pool, adapters, [(1, 1), (BASE, 1), (0, 1), (2, 2000), (0, 1), (5, 1)])


def test_wide_prefill_equals_the_loop(wide: tuple[RankPagePool, list[Adapter]]) -> None:
    pool, adapters = wide
    check_step(pool, adapters, [(5, 1), (0, 200), (BASE, 1), (9, 130), (BLENDS[2], 70)])
    check_step(pool, adapters, [(5, 1), (0, 800), (BASE, 1), (9, 230), (BLENDS[2], 70)])


def test_the_highest_rank_has_a_gain_and_a_bias_beside_it() -> None:
    kinds = ["q_proj", "down_proj"]
    adapter = make_adapter(SMALL, 256, modules=kinds, gains=kinds, biases=kinds, dtype=torch.float16)
    check_step(filled_pool(SMALL, [adapter], torch.float16), [adapter], [(0, 3), (BASE, 1), (0, 20)])
    with pytest.raises(ValueError, match="an adapter of rank 257; at most rank 256 runs on a GPU"):
        filled_pool(SMALL, [make_adapter(SMALL, 257, modules=kinds)], torch.float32)


def test_shrunk_rows_are_kept_in_float32() -> None:
    """1 + 2^-10, which bfloat16 rounds to 1, reaches B unrounded: 1024 (1 + 2^-10) - 1024 is 1 and not 0."""
    adapter = make_adapter(make_layout(num_layers=1), 2, modules=["o_proj"])
    a, b = adapter.matrices[0, "o_proj", 0]
    a.zero_()
    a[:, 0] = 1.0
    a[0, 1] = 1.0
    b[0], b[1] = 1024.0, -1024.0
    step = filled_pool(adapter.layout, [adapter], torch.bfloat16).step([(0, 1)])
    assert step is not None
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros_like(x)
    x[0, 0], x[0, 1] = 1.0, 2.0**-10
    step.add_delta(0, "o_proj", x, y)
    assert torch.equal(y, torch.ones_like(y))


def test_the_same_step_gives_the_same_bits(wide: tuple[RankPagePool, list[Adapter]]) -> None:
    pool, adapters = wide
    mixes: list[Segments] = [
        make_mix("uniform", 64, len(adapters), seed=9, blends=BLENDS[:2]),
        [(0, 300), (2, 1), (9, 77), (BLENDS[2], 40)],
        [(0, 900), (2, 1), (9, 177), (BLENDS[2], 40)],
    ]
    for segments in mixes:
        results = []
        for _ in range(5):
            step = pool.step(segments)
            assert step is not None
            x = random_rows(step.num_tokens, WIDE.linears[0].in_features, pool.pages.dtype, seed=1).cuda()
            y = random_rows(step.num_tokens, WIDE.linears[0].out_features, pool.pages.dtype, seed=2).cuda()
            step.add_delta(0, "qkv_proj", x, y)
            results.append(y)
        assert all(same_bits(results[0], other) for other in results[1:])


def test_an_adapter_that_overflows_reaches_no_other_row() -> None:
    """Finite but huge weights make inf and NaN; they stay in the rows of their own tenant."""
    good, huge = make_adapter(SMALL, 8, seed=1), make_adapter(SMALL, 8, seed=2)
    for a, b in huge.matrices.values():
        a.fill_(3e38)
        b[::2], b[1::2] = 3e38, -3e38
    pool = filled_pool(SMALL, [good, huge], torch.bfloat16)
    owners = torch.tensor([0, *[1] * 40, BASE, 1, 0, 0])
    outputs = []
    for segments in ([(0, 1), (1, 40), (BASE, 1), (1, 1), (0, 2)], [(0, 1), (BASE, 42), (0, 2)]):
        step = pool.step(segments)
        assert step is not None
        x = random_rows(45, 64, torch.bfloat16, seed=1).abs().cuda()
        y = random_rows(45, 64, torch.bfloat16, seed=2).cuda()
        step.add_delta(0, "o_proj", x, y)
        outputs.append(y.cpu())
    assert not outputs[0][owners == 1].isfinite().any()
    assert same_bits(outputs[0][owners != 1], outputs[1][owners != 1])


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("num_rows", [64, 300, 1100])
def test_a_graph_serves_other_mixes_than_at_capture(
    small: tuple[RankPagePool, list[Adapter]], num_rows: int, begun: bool
) -> None:
    """begun: shrink comes before a copy that stands for the base product."""
    pool, adapters = small
    x = {linear.name: torch.zeros(num_rows, linear.in_features) for linear in SMALL.linears}
    x = {name: tensor.to("cuda", pool.pages.dtype) for name, tensor in x.items()}
    y = {linear.name: torch.zeros(num_rows, linear.out_features) for linear in SMALL.linears}
    y = {name: tensor.to("cuda", pool.pages.dtype) for name, tensor in y.items()}
    base = {name: tensor.clone() for name, tensor in y.items()}
    assert pool.step([(0, num_rows)]) is not None
    step = pool.graph_step(num_rows)
    step.add_delta(1, "qkv_proj", x["qkv_proj"], y["qkv_proj"])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for linear in SMALL.linears:
            name = linear.name
            product = CopiedProduct(y[name], base[name])
            if begun:
                step.base_product(1, name, x[name], product)
            else:
                product(x[name])
            step.add_delta(1, name, x[name], y[name])
    for seed, (mix, batch) in enumerate(
        [("distinct", num_rows), ("zipf", num_rows), ("identical", num_rows), ("uniform", num_rows - 5)]
    ):
        segments = make_mix(mix, batch, len(adapters), seed=seed, blends=BLENDS[seed % 3 :][:MAX_BLENDS])
        inputs, before = {}, {}
        for linear in SMALL.linears:
            name = linear.name
            inputs[name] = random_rows(num_rows, linear.in_features, pool.pages.dtype, seed)
            before[name] = random_rows(num_rows, linear.out_features, pool.pages.dtype, seed + 50)
            x[name].copy_(inputs[name])
            base[name].copy_(before[name])
        assert pool.step(segments) is not None
        graph.replay()
        padded = [*segments, *[(BASE, 1)] * (num_rows - batch)]
        for linear in SMALL.linears:
            name = linear.name
            check_output(adapters, padded, 1, linear, inputs[name], before[name], y[name].cpu())


def test_a_delta_is_begun_and_then_added(small: tuple[RankPagePool, list[Adapter]]) -> None:
    """Of one linear at a time, outside of graphs."""
    pool, adapters = small
    segments = make_mix("uniform", 16, len(adapters), seed=3)
    step = pool.step(segments)
    assert step is not None
    for linear in SMALL.linears:
        x = random_rows(16, linear.in_features, pool.pages.dtype, seed=1).cuda()
        y = random_rows(16, linear.out_features, pool.pages.dtype, seed=50)
        result, product = y.cuda(), y.cuda()
        base = CopiedProduct(result, product)
        assert step.base_product(1, linear.name, x, base) is result
        with pytest.raises(RuntimeError, match=f"goes on without add_delta of {linear.name} of layer 1"):
            step.base_product(1, linear.name, x, base)
        for layer, other in ((1, x.clone()), (0, x)):
            with pytest.raises(RuntimeError, match=f"where that of {linear.name} of layer 1 was begun"):
                step.add_delta(layer, linear.name, other, result)
        step.add_delta(1, linear.name, x, result)
        check_output(adapters, segments, 1, linear, x.cpu(), y, result.cpu())


def test_what_a_step_has_begun_ends_with_it(small: tuple[RankPagePool, list[Adapter]]) -> None:
    """As where a step has failed between a product and its delta."""
    pool, adapters = small
    linear = SMALL.linears[3]
    x = random_rows(16, linear.in_features, pool.pages.dtype, seed=1)
    y = random_rows(16, linear.out_features, pool.pages.dtype, seed=2)
    for seed in range(3):
        segments = make_mix("uniform", 16, len(adapters), seed=seed)
        step = pool.step(segments)
        assert step is not None
        result = y.cuda()
        step.add_delta(1, linear.name, x.cuda(), result)
        check_output(adapters, segments, 1, linear, x, y, result.cpu())
        step.base_product(0, linear.name, x.cuda(), CopiedProduct(result, y.cuda()))


def test_a_graph_takes_the_begun_delta_alone(small: tuple[RankPagePool, list[Adapter]]) -> None:
    pool, _ = small
    assert pool.step([(0, 16)]) is not None
    step = pool.graph_step(16)
    x = {
        linear.name: random_rows(16, linear.in_features, pool.pages.dtype, 1).cuda()
        for linear in SMALL.linears
    }
    y = {
        linear.name: random_rows(16, linear.out_features, pool.pages.dtype, 2).cuda()
        for linear in SMALL.linears
    }
    begun = CopiedProduct(y["o_proj"], y["o_proj"].clone())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step.base_product(1, "o_proj", x["o_proj"], begun)
        with pytest.raises(RuntimeError, match="goes on without add_delta of o_proj of layer 1"):
            step.base_product(1, "o_proj", x["o_proj"], begun)
        step.add_delta(1, "o_proj", x["o_proj"], y["o_proj"])
        step.base_product(1, "o_proj", x["o_proj"], begun)
        with pytest.raises(RuntimeError, match="down_proj of layer 1 where that of o_proj of layer 1"):
            step.add_delta(1, "down_proj", x["down_proj"], y["down_proj"])
        step.add_delta(1, "o_proj", x["o_proj"], y["o_proj"])


def test_steps_in_a_row_each_see_their_own_mix(small: tuple[RankPagePool, list[Adapter]]) -> None:
    """More steps under way than tables that are staged at once, with more blends than have rows at once."""
    pool, adapters = small
    linear = SMALL.linears[3]
    x = random_rows(16, linear.in_features, pool.pages.dtype, seed=1)
    y = random_rows(16, linear.out_features, pool.pages.dtype, seed=2)
    mixes = [
        make_mix("uniform", 16, len(adapters), seed=seed, blends=[BLENDS[(seed + i) % 5] for i in range(3)])
        for seed in range(20)
    ]
    device_x, results = x.cuda(), []
    for segments in mixes:
        step = pool.step(segments)
        assert step is not None
        results.append(y.cuda())
        step.add_delta(1, linear.name, device_x, results[-1])
    for segments, result in zip(mixes, results, strict=True):
        check_output(adapters, segments, 1, linear, x, y, result.cpu())


def test_a_slot_can_be_loaded_again() -> None:
    one, other = (
        make_adapter(SMALL, 24, seed=1),
        make_adapter(SMALL, 9, seed=2, modules=["q_proj", "down_proj"]),
    )
    pool = filled_pool(SMALL, [one], torch.float32)
    check_step(pool, [one], [(0, 3)])
    pool.clear(0)
    with pytest.raises(ValueError, match="slot 0 holds no adapter"):
        pool.step([(0, 1)])
    host = other.host_pages(torch.float32)
    pool.load(0, [5, 0], host, other.rows)
    check_step(pool, [other], [(BASE, 1), (0, 3)])


def test_a_blend_follows_what_is_in_its_members_slots() -> None:
    one, two, other = (make_adapter(SMALL, rank, seed=rank) for rank in (9, 4, 20))
    pool = filled_pool(SMALL, [one, two], torch.float32, members=[0, 1])
    blend: Blend = ((0, 0.5), (1, -2.0))
    check_step(pool, [one, two], [(blend, 3), (BASE, 1), (0, 1)])
    pool.clear(0)
    with pytest.raises(ValueError, match="slot 0 holds no adapter"):
        pool.step([(blend, 1)])
    pool.load(0, [4, 0, 2], other.host_pages(torch.float32, beyond=0.0), other.rows)
    check_step(pool, [other, two], [(blend, 3), (BASE, 1), (0, 1)])


def test_y_may_be_a_view_of_a_larger_buffer(small: tuple[RankPagePool, list[Adapter]]) -> None:
    pool, adapters = small
    segments: Segments = [(0, 1), (BASE, 1), (0, 1)]
    step = pool.step(segments)
    assert step is not None
    linear = SMALL.linears[1]
    x = random_rows(3, linear.in_features, pool.pages.dtype, seed=1)
    y = random_rows(3, linear.out_features, pool.pages.dtype, seed=2)
    buffer = torch.zeros(8, 104, dtype=y.dtype, device="cuda")
    view = buffer[:3, 16:80]
    view.copy_(y)
    step.add_delta(0, "o_proj", x.cuda(), view)
    check_output(adapters, segments, 0, linear, x, y, view.cpu())
    view.zero_()
    assert not buffer.any()


def test_what_the_kernels_cannot_take_is_refused(small: tuple[RankPagePool, list[Adapter]]) -> None:
    pool, _ = small
    step = pool.step([(0, 2)])
    assert step is not None
    x = torch.zeros(2, 64, dtype=pool.pages.dtype, device="cuda")
    with pytest.raises(ValueError, match=r"y is \(2, 32\) where \[rows, 64\] is needed"):
        step.add_delta(0, "o_proj", x, x[:, :32])
    with pytest.raises(ValueError, match=r"x is torch\.float64 on cuda:0 where the adapters are"):
        step.add_delta(0, "o_proj", x.double(), x)
    with pytest.raises(ValueError, match="must start at a multiple of 16 bytes"):
        step.add_delta(0, "o_proj", torch.zeros(2, 65, dtype=x.dtype, device="cuda")[:, 1:], x)
    with pytest.raises(ValueError, match=f"a step of {MAX_TOKENS + 1} tokens; this pool was made with"):
        pool.step([(0, MAX_TOKENS + 1)])
    odd = AdapterLayout(1, (PackedLinear("o_proj", 60, (LinearSlice("o", 64),)),))
    with pytest.raises(ValueError, match="o_proj has a width of 60; adapters on a GPU need multiples of 8"):
        RankPagePool(odd, 2, 1, torch.bfloat16, "cuda")
