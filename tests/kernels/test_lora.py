"""The LoRA op against the plainest loop, over mixes, batch sizes, ranks, types and segment lengths."""

import math

import pytest
import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.linear import Linear
from deltaplane_kernels.lora import LONG_RUN, RankPagePool
from deltaplane_kernels.lora_segments import Blend, Segments
from deltaplane_kernels.norm import add_rms_norm
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
LAYOUT = make_layout()


def filled_pool(
    adapters: list[Adapter],
    dtype: torch.dtype = torch.float32,
    layout: AdapterLayout = LAYOUT,
    max_blends: int = 0,
) -> RankPagePool:
    """A pool with adapter i in slot i, in pages that run backwards and are never neighbours."""
    hosts = [adapter.host_pages(dtype) for adapter in adapters]
    free = list(range(2 * sum(len(host) for host in hosts)))
    pool = RankPagePool(layout, len(free), len(adapters), dtype, max_blends=max_blends)
    for slot, (adapter, host) in enumerate(zip(adapters, hosts, strict=True)):
        pool.load(slot, [free.pop() for _ in range(2 * len(host))][::2], host, adapter.rows)
    pool.check_integrity()
    return pool


def random_io(
    num_tokens: int, layout: AdapterLayout = LAYOUT, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """x [T, in] and y [T, out] of each packed linear."""
    generator = torch.Generator().manual_seed(seed)
    return {
        linear.name: (
            torch.randn(num_tokens, linear.in_features, generator=generator),
            torch.randn(num_tokens, linear.out_features, generator=generator),
        )
        for linear in layout.linears
    }


def check_step(
    pool: RankPagePool,
    adapters: list[Adapter],
    segments: Segments,
    layout: AdapterLayout = LAYOUT,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compares the step on each packed linear with the loop; what no adapter touches must keep every bit."""
    num_tokens = sum(count for _, count in segments)
    step = pool.step(segments)
    owners = [slot for slot, count in segments for _ in range(count)]
    if all(slot == BASE for slot in owners):
        assert step is None
        return
    assert step is not None
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for layer in range(layout.num_layers):
        for linear in layout.linears:
            x, y = (tensor.to(dtype) for tensor in random_io(num_tokens, layout, seed=layer)[linear.name])
            y[:, ::3] = -0.0  # adding a zero would turn it into 0.0
            before = y.clone()
            expected = add_delta_by_loop(adapters, segments, layer, linear, x, y)
            step.add_delta(layer, linear.name, x, y)
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
            column = 0
            for index, part in enumerate(linear.slices):
                columns = slice(column, column + part.out_features)
                column += part.out_features
                for row, slot in enumerate(owners):
                    if not is_touched(adapters, slot, (layer, linear.name, index)):
                        assert same_bits(y[row, columns], before[row, columns])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def mixed_adapters(dtype: torch.dtype = torch.float32) -> list[Adapter]:
    return [
        make_adapter(LAYOUT, 8, seed=1, dtype=dtype),
        make_adapter(LAYOUT, 16, seed=2, modules=["q_proj", "v_proj"], dtype=dtype),
        make_adapter(LAYOUT, [1, 4, 12, 3], seed=3, dtype=dtype),
        make_adapter(LAYOUT, 17, seed=4, layers=[1], dtype=dtype),
        make_adapter(LAYOUT, 2, seed=5, modules=["down_proj"], dtype=dtype),
        make_adapter(LAYOUT, 8, seed=6, modules=["k_proj", "up_proj"], dtype=dtype),
    ]


@pytest.fixture(scope="module")
def adapters() -> list[Adapter]:
    return mixed_adapters()


@pytest.fixture(scope="module")
def pool(adapters: list[Adapter]) -> RankPagePool:
    return filled_pool(adapters)


@pytest.mark.parametrize("batch", BATCH_SIZES)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_equal_the_loop(pool: RankPagePool, adapters: list[Adapter], mix: str, batch: int) -> None:
    check_step(pool, adapters, make_mix(mix, batch, len(adapters), seed=batch))


def test_ranks_mixed_in_one_batch_equal_the_loop() -> None:
    layout = make_layout(num_layers=1)
    adapters = [make_adapter(layout, rank, seed=rank) for rank in RANKS]
    segments = make_mix("distinct", 2 * len(RANKS) + 1, len(adapters))
    check_step(filled_pool(adapters, layout=layout), adapters, segments, layout)


def rescaled_adapters(dtype: torch.dtype = torch.float32) -> list[Adapter]:
    """Gains and biases beside rank rows, across the end of a page, and biases alone."""
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    return [
        make_adapter(LAYOUT, [8, 3], seed=1, gains=[*attention, *mlp], dtype=dtype),
        make_adapter(LAYOUT, 7, seed=2, gains=attention, biases=["q_proj", "down_proj"], dtype=dtype),
        make_adapter(LAYOUT, [15, 16], seed=3, modules=attention, gains=mlp, biases=attention, dtype=dtype),
        make_adapter(LAYOUT, 1, seed=4, modules=[], layers=[1], biases=["k_proj", "o_proj"], dtype=dtype),
        make_adapter(LAYOUT, 12, seed=5, dtype=dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gains_and_biases_beside_plain_and_base_rows_equal_the_loop(dtype: torch.dtype) -> None:
    adapters = rescaled_adapters(dtype)
    pool = filled_pool(adapters, dtype)
    for mix, batch in (("distinct", 13), ("zipf", 33), ("identical", 3)):
        check_step(pool, adapters, make_mix(mix, batch, len(adapters), seed=batch), dtype=dtype)
    check_step(pool, adapters, [(1, 1), (3, 40), (BASE, 2), (1, 50), (0, 1), (2, 35)], dtype=dtype)


def test_dora_with_a_trained_bias_is_a_gain_a_bias_and_a_scaled_b() -> None:
    """y = f (W x + s B A x) + b1 with f = m / |W + s B A| of each output, out of y = W x + b0."""
    layout = make_layout(num_layers=1)
    adapter = make_adapter(layout, 4, seed=1, modules=["o_proj"], gains=["o_proj"], biases=["o_proj"])
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(3, 64, generator=generator), torch.randn(64, 64, generator=generator)
    base_bias, own_bias, magnitude = (torch.randn(64, generator=generator).abs() for _ in range(3))
    key, scale = (0, "o_proj", 0), 0.7
    a, b = adapter.matrices[key]
    merged = w + scale * b.T @ a
    factor = magnitude / merged.norm(dim=1)
    expected = torch.nn.functional.linear(x, factor[:, None] * merged, own_bias)
    adapter.gains[key] = factor - 1
    adapter.biases[key] = own_bias - base_bias - (factor - 1) * base_bias
    b.mul_(scale * factor)
    step = filled_pool([adapter], layout=layout).step([(0, 3)])
    assert step is not None
    y = torch.nn.functional.linear(x, w, base_bias)
    step.add_delta(0, "o_proj", x, y)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


BLENDS: list[Blend] = [
    ((0, 0.7), (2, -1.3)),
    ((2, 1.0),),
    ((4, 0.25), (5, 2.0), (3, 0.0), (1, -0.5)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blends_beside_their_members_and_base_rows_equal_the_loop(dtype: torch.dtype) -> None:
    adapters = mixed_adapters(dtype)
    pool = filled_pool(adapters, dtype, max_blends=len(BLENDS))
    for mix, batch in (("distinct", 23), ("zipf", 33), ("identical", 3)):
        segments = make_mix(mix, batch, len(adapters), seed=batch, blends=BLENDS)
        check_step(pool, adapters, segments, dtype=dtype)
    prefills: Segments = [(BLENDS[0], 1), (0, 40), (BLENDS[2], 50), (BASE, 2), (BLENDS[0], 33), (2, 1)]
    check_step(pool, adapters, prefills, dtype=dtype)


def test_a_blend_of_one_adapter_as_it_is_gives_its_bits(adapters: list[Adapter]) -> None:
    pool = filled_pool(adapters, max_blends=1)
    results = []
    for slots in (2, ((2, 1.0),)):
        step = pool.step([(slots, 3)])
        assert step is not None
        x, y = random_io(3)["gate_up_proj"]
        step.add_delta(0, "gate_up_proj", x, y)
        results.append(y)
    assert same_bits(*results)


@pytest.mark.parametrize("num_tokens", [LONG_RUN - 1, LONG_RUN, 300])
def test_prefill_beside_decodes_equals_the_loop(
    pool: RankPagePool, adapters: list[Adapter], num_tokens: int
) -> None:
    decodes = [(0, 1), (2, 1), (BASE, 1), (0, 1), (3, 1)]
    check_step(pool, adapters, [*decodes, (2, num_tokens), (BASE, 3), (0, num_tokens), (2, 1)])


def test_prefill_of_2000_tokens_beside_decodes_equals_the_loop() -> None:
    layout = make_layout(num_layers=1)
    adapters = [make_adapter(layout, 8, seed=1), make_adapter(layout, 12, seed=2)]
    check_step(
        filled_pool(adapters, layout=layout),
        adapters,
        [(1, 1), (BASE, 1), (0, 1), (1, 2000), (0, 1)],
        layout,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_loop(dtype: torch.dtype) -> None:
    adapters = [
        make_adapter(LAYOUT, 8, seed=1, dtype=dtype),
        make_adapter(LAYOUT, 17, seed=2, modules=["q_proj", "up_proj"], dtype=dtype),
    ]
    segments = [(0, 1), (1, 1), (BASE, 1), (0, 1), (1, 40), (BASE, 2), (1, 1)]
    check_step(filled_pool(adapters, dtype), adapters, segments, dtype=dtype)


def test_shrunk_rows_are_kept_in_float32() -> None:
    """1 + 2^-10, which bfloat16 rounds to 1, reaches B unrounded: 1024 (1 + 2^-10) - 1024 is 1 and not 0."""
    layout = make_layout(num_layers=1)
    adapter = make_adapter(layout, 2, modules=["o_proj"])
    a, b = adapter.matrices[0, "o_proj", 0]
    a.zero_()
    a[:, 0] = 1.0
    a[0, 1] = 1.0
    b[0], b[1] = 1024.0, -1024.0
    step = filled_pool([adapter], torch.bfloat16, layout).step([(0, 1)])
    assert step is not None
    x, y = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 1.0, 2.0**-10
    step.add_delta(0, "o_proj", x, y)
    assert torch.equal(y, torch.ones_like(y))


def test_sizes_that_are_no_multiple_of_the_alignment_equal_the_loop() -> None:
    layout = make_layout(hidden=60, kv=20, intermediate=99)
    adapters = [
        make_adapter(layout, 8, seed=1),
        make_adapter(layout, 12, seed=2, modules=["k_proj", "o_proj"]),
    ]
    check_step(filled_pool(adapters, layout=layout), adapters, [(0, 1), (1, 2), (BASE, 1), (0, 3)], layout)


def test_the_same_step_gives_the_same_bits(pool: RankPagePool) -> None:
    segments = make_mix("uniform", 33, 6, seed=9)
    results = []
    for _ in range(2):
        step = pool.step(segments)
        assert step is not None
        x, y = random_io(33)["qkv_proj"]
        step.add_delta(1, "qkv_proj", x, y)
        results.append(y)
    assert same_bits(*results)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_an_adapter_that_overflows_reaches_no_other_row(num_tokens: int) -> None:
    """Finite but huge weights make inf and NaN; they stay in the rows of their own tenant."""
    good, huge = make_adapter(LAYOUT, 8, seed=1), make_adapter(LAYOUT, 8, seed=2)
    for a, b in huge.matrices.values():
        a.fill_(3e38)
        b[::2], b[1::2] = 3e38, -3e38
    segments = [(0, 1), (1, num_tokens), (BASE, 1), (1, 1), (0, 2)]
    quiet = [(0, 1), (BASE, num_tokens), (BASE, 1), (BASE, 1), (0, 2)]
    pool = filled_pool([good, huge])
    owners = torch.tensor([slot for slot, count in segments for _ in range(count)])
    for linear in LAYOUT.linears:
        outputs = []
        for each in (segments, quiet):
            step = pool.step(each)
            assert step is not None
            x, y = random_io(len(owners))[linear.name]
            step.add_delta(0, linear.name, x.abs(), y)
            outputs.append(y)
        assert not outputs[0][owners == 1].isfinite().any()
        assert same_bits(outputs[0][owners != 1], outputs[1][owners != 1])


def test_inf_in_a_base_row_stays_there(pool: RankPagePool, adapters: list[Adapter]) -> None:
    step = pool.step([(0, 1), (BASE, 1), (0, 1)])
    assert step is not None
    x, y = random_io(3)["o_proj"]
    expected = add_delta_by_loop(adapters, [(0, 1), (BASE, 1), (0, 1)], 0, LAYOUT.linears[1], x, y)
    x[1] = torch.inf
    step.add_delta(0, "o_proj", x, y)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_step_of_the_base_alone_is_none(pool: RankPagePool) -> None:
    assert pool.step([(BASE, 1), (BASE, 300)]) is None
    assert pool.step([]) is None


def test_y_may_be_a_view_of_a_larger_buffer(pool: RankPagePool, adapters: list[Adapter]) -> None:
    segments = [(0, 1), (BASE, 1), (0, 1)]
    step = pool.step(segments)
    assert step is not None
    x, y = random_io(3)["o_proj"]
    buffer = torch.zeros(8, 100)
    buffer[:3, 10:74] = y
    step.add_delta(0, "o_proj", x, buffer[:3, 10:74])
    expected = add_delta_by_loop(adapters, segments, 0, LAYOUT.linears[1], x, y)
    torch.testing.assert_close(buffer[:3, 10:74].double(), expected, rtol=2e-5, atol=2e-5)
    buffer[:3, 10:74] = 0
    assert not buffer.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_the_residual_stream_is_that_of_its_deltas(dtype: torch.dtype) -> None:
    adapters = mixed_adapters(dtype)
    step = filled_pool(adapters, dtype=dtype).step(make_mix("uniform", 33, len(adapters), seed=1))
    assert step is not None
    x, y = (tensor.to(dtype) for tensor in random_io(33)["down_proj"])
    weight, residual = y[0].clone(), y.flip(0)
    expected, expected_residual = y.clone(), residual.clone()
    step.add_delta(1, "down_proj", x, expected)
    assert not same_bits(expected, y)
    normed = add_rms_norm(expected, expected_residual, weight, 1e-5)
    assert same_bits(step.add_delta_rms_norm(1, "down_proj", x, y, residual, weight, 1e-5), normed)
    assert same_bits(residual, expected_residual)


def test_rows_that_do_not_fit_the_step_are_refused(pool: RankPagePool) -> None:
    step = pool.step([(0, 2)])
    assert step is not None
    x, y = random_io(3)["o_proj"]
    with pytest.raises(ValueError, match="a step of 2 tokens got x of 3 rows and y of 2"):
        step.add_delta(0, "o_proj", x, y[:2])
    with pytest.raises(ValueError, match="a step of 2 tokens got x of 3 rows and y of 2"):
        step.add_delta_rms_norm(0, "o_proj", x, y[:2], y[:2], y[0], 1e-5)
    with pytest.raises(ValueError, match="a step of 2 tokens got x of 3 rows"):
        step.base_product(0, "o_proj", x, Linear(torch.zeros(8, x.shape[1])))


@pytest.mark.parametrize(
    ("segments", "complaint"),
    [
        ([(0, 0)], "at least 1 is needed"),
        ([(BASE, -1)], "at least 1 is needed"),
        ([(0, 1), (99, 1)], "slot 99 holds no adapter"),
        ([(((0, 1.0), (99, 1.0)), 1)], "slot 99 holds no adapter"),
        ([(((0, 1.0), (BASE, 1.0)), 1)], "slot -1 holds no adapter"),
        ([((), 1)], "it needs one at least, and each once"),
        ([(((0, 1.0), (0, 2.0)), 1)], r"slots \[0, 0\]; it needs one at least, and each once"),
        ([(((0, math.inf),), 1)], r"a blend's weights are finite, not \[inf\]"),
        ([(((0, 1.0),), 1), (((1, 1.0),), 1), (((0, 2.0),), 1)], "a step of 3 blends; this pool takes 2"),
        ([(((0, 1.0), (1, 1.0)), 1)], "slot 1 holds more than plain LoRA, which no blend takes"),
        ([(((0, 1.0), (2, 1.0)), 1)], "a blend with pages of 264 rows; at most 256"),
    ],
)
def test_bad_segments_are_refused(segments: Segments, complaint: str) -> None:
    layout = make_layout(num_layers=1)
    adapters = [
        make_adapter(layout, 4),
        make_adapter(layout, 4, biases=["q_proj"]),
        make_adapter(layout, 250, modules=["q_proj"]),
    ]
    with pytest.raises(ValueError, match=complaint):
        filled_pool(adapters, layout=layout, max_blends=2).step(segments)
