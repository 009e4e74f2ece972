"""Deltas in one kernel with the residual stream and its norm, against kernel by kernel; in graphs too."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.lora import LoraStep, RankPagePool
from deltaplane_kernels.lora_norm_cuda import MAX_ROWS, MAX_WIDTH
from deltaplane_kernels.lora_segments import Segments
from deltaplane_kernels.norm import NormWeight, RowWeights, add_rms_norm
from gpu_lora_pools import (
    BLENDS,
    EPS,
    MAX_BLENDS,
    MEMBERS,
    TOLERANCES,
    CopiedProduct,
    filled_pool,
    make_adapters,
    norm_of,
    random_rows,
    same_bits,
)
from lora_cases import BASE, MIXES, Adapter, make_adapter, make_layout, make_mix

DTYPES = [torch.bfloat16, torch.float16]
BATCH_SIZES = (1, 2, 3, 7, 16, 32, 33, 64, MAX_ROWS)
RANKS = (1, 2, 3, 4, 8, 12, 16, 17, 32, 64, 100, 128, 256)
LINEARS = ("o_proj", "down_proj")
SMALL = make_layout(hidden=72)
"""Blocks with a thread of columns each, and some without any."""


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def small(request: pytest.FixtureRequest) -> tuple[RankPagePool, list[Adapter]]:
    adapters = make_adapters(SMALL, request.param)
    return filled_pool(SMALL, adapters, request.param, MEMBERS), adapters


@dataclass
class Operands:
    """x [T, in], y and residual [T, H], and the norm's weight."""

    x: Tensor
    y: Tensor
    residual: Tensor
    weight: NormWeight

    @classmethod
    def random(
        cls, layout: AdapterLayout, linear: str, num_rows: int, dtype: torch.dtype, seed: int
    ) -> "Operands":
        place = next(one for one in layout.linears if one.name == linear)
        x = random_rows(num_rows, place.in_features, dtype, seed)
        y, residual = (random_rows(num_rows, place.out_features, dtype, seed + 100 * n) for n in (1, 2))
        y[:, ::3] = -0.0  # with a residual of -0.0: adding a zero of a row without a delta would give 0.0
        residual[:, ::6] = -0.0
        weight = random_rows(1, place.out_features, dtype, seed + 300)[0]
        return cls(x.cuda(), y.cuda(), residual.cuda(), weight.cuda())

    def sum(self, step: LoraStep, layer: int, linear: str) -> Tensor:
        """The residual stream kernel by kernel."""
        y = self.y.clone()
        step.add_delta(layer, linear, self.x, y)
        return self.residual + y

    def fused(self, step: LoraStep, layer: int, linear: str) -> Tensor:
        return step.add_delta_rms_norm(layer, linear, self.x, self.y, self.residual, self.weight, EPS)


def units_apart(one: Tensor, other: Tensor) -> int:
    """The most units in the last place of two-byte floats."""
    places = [tensor.contiguous().view(torch.int16).int() for tensor in (one, other)]
    ordered = [torch.where(place < 0, -32768 - place, place) for place in places]
    return int((ordered[0] - ordered[1]).abs().max())


def rows_alone(segments: Segments) -> list[int]:
    """Rows of the base, and those whose adapter or blend has no other row: expand sums these alike."""
    owners = [slots for slots, count in segments for _ in range(count)]
    return [row for row, slots in enumerate(owners) if slots == BASE or owners.count(slots) == 1]


def check_sum(residual: Tensor, expected: Tensor, segments: Segments) -> None:
    """expected: kernel by kernel."""
    rows, tolerance = rows_alone(segments), TOLERANCES[residual.dtype]
    assert same_bits(residual[rows], expected[rows])
    torch.testing.assert_close(residual, expected, rtol=tolerance, atol=tolerance)


def check_step(pool: RankPagePool, adapters: Sequence[Adapter], segments: Segments) -> None:
    layout, dtype = adapters[0].layout, pool.pages.dtype
    step = pool.step(segments)
    if step is None:
        assert all(slot == BASE for slot, _ in segments)
        return
    for layer in range(layout.num_layers):
        for linear in LINEARS:
            operands = Operands.random(layout, linear, step.num_tokens, dtype, seed=layer)
            expected = operands.sum(step, layer, linear)
            normed = operands.fused(step, layer, linear)
            check_sum(operands.residual, expected, segments)
            assert isinstance(operands.weight, Tensor)
            assert units_apart(normed, norm_of(operands.residual, operands.weight)) <= 2


@pytest.mark.parametrize("batch", BATCH_SIZES)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_equal_kernel_by_kernel(
    small: tuple[RankPagePool, list[Adapter]], mix: str, batch: int
) -> None:
    pool, adapters = small
    blends = BLENDS[batch % 3 :][:MAX_BLENDS]
    check_step(pool, adapters, make_mix(mix, batch, len(adapters), seed=batch, blends=blends))


@pytest.mark.parametrize("num_rows", [5, 40])
@pytest.mark.parametrize("width", [8, 520, 2056, 4096, MAX_WIDTH])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_width_equal_kernel_by_kernel(dtype: torch.dtype, width: int, num_rows: int) -> None:
    layout = make_layout(num_layers=1, hidden=width, intermediate=4104)
    adapters = [
        make_adapter(layout, 20, seed=1, gains=["o_proj"], biases=["down_proj"], dtype=dtype),
        make_adapter(layout, [3, 17], seed=2, modules=["o_proj", "down_proj"], dtype=dtype),
        make_adapter(layout, 4, seed=3, modules=["o_proj"], dtype=dtype),
    ]
    pool = filled_pool(layout, adapters, dtype)
    check_step(pool, adapters, make_mix("distinct", num_rows, len(adapters)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_equal_kernel_by_kernel(dtype: torch.dtype) -> None:
    adapters = [make_adapter(SMALL, rank, seed=rank, dtype=dtype) for rank in RANKS]
    pool = filled_pool(SMALL, adapters, dtype)
    check_step(pool, adapters, make_mix("distinct", len(adapters) + 1, len(adapters)))
    check_step(pool, adapters, [(slot, 5) for slot in range(len(adapters))])


def own_weights(num_rows: int, base: Tensor) -> tuple[RowWeights, Tensor]:
    """Of slots that have a weight, that have none and of rows without a slot; the same as [T, H]."""
    width = len(base)
    pool = torch.full((3, width + 8), torch.nan, dtype=base.dtype, device="cuda")
    pool[1:, 8:] = random_rows(2, width, base.dtype, seed=7).cuda()
    offsets = torch.tensor([[-1, 1], [2 * (width + 8) + 8, 2], [width + 16, 3]], device="cuda")[:, 0]
    slots = (torch.arange(num_rows, dtype=torch.int32, device="cuda") % 4) - 1
    weights = torch.stack([base, base, pool[2, 8:], pool[1, 8:]])[(slots + 1).long()]
    return RowWeights(base, slots, offsets, pool), weights


@pytest.mark.parametrize("batch", [3, 33])
@pytest.mark.parametrize("linear", LINEARS)
def test_rows_may_have_norm_weights_of_their_own(
    small: tuple[RankPagePool, list[Adapter]], linear: str, batch: int
) -> None:
    pool, adapters = small
    segments = make_mix("distinct", batch, len(adapters))
    step = pool.step(segments)
    assert step is not None
    operands = Operands.random(SMALL, linear, batch, pool.pages.dtype, seed=1)
    assert isinstance(operands.weight, Tensor)
    operands.weight, weights = own_weights(batch, operands.weight)
    expected = operands.sum(step, 1, linear)
    normed = operands.fused(step, 1, linear)
    check_sum(operands.residual, expected, segments)
    assert units_apart(normed, norm_of(operands.residual, weights)) <= 2


@pytest.mark.parametrize(
    ("dtype", "batch"), [(torch.float32, 7), (torch.bfloat16, MAX_ROWS + 1)], ids=["float32", "many rows"]
)
def test_other_steps_are_computed_kernel_by_kernel(dtype: torch.dtype, batch: int) -> None:
    adapters = make_adapters(SMALL, dtype)
    step = filled_pool(SMALL, adapters, dtype).step(make_mix("uniform", batch, len(adapters), seed=2))
    assert step is not None
    operands = Operands.random(SMALL, "o_proj", batch, dtype, seed=3)
    y, residual = operands.y.clone(), operands.residual.clone()
    step.add_delta(0, "o_proj", operands.x, y)
    expected = add_rms_norm(y, residual, operands.weight, EPS)
    assert same_bits(operands.fused(step, 0, "o_proj"), expected)
    assert same_bits(operands.residual, residual)


@pytest.mark.parametrize("batch", [7, 64])
def test_the_same_batch_gives_the_same_bits(small: tuple[RankPagePool, list[Adapter]], batch: int) -> None:
    pool, adapters = small
    step = pool.step(make_mix("zipf", batch, len(adapters), seed=5))
    assert step is not None
    runs = [Operands.random(SMALL, "down_proj", batch, pool.pages.dtype, seed=4) for _ in range(20)]
    normed = [operands.fused(step, 1, "down_proj") for operands in runs]
    for operands, out in zip(runs, normed, strict=True):
        assert same_bits(out, normed[0])
        assert same_bits(operands.residual, runs[0].residual)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("num_rows", [24, 64])
def test_a_graph_serves_other_mixes_than_at_capture(
    small: tuple[RankPagePool, list[Adapter]], num_rows: int, linear: str, begun: bool
) -> None:
    """begun: shrink comes before a copy that stands for the base product."""
    pool, adapters = small
    dtype = pool.pages.dtype
    given = Operands.random(SMALL, linear, num_rows, dtype, seed=0)
    operands = Operands(given.x, given.y.clone(), given.residual, given.weight)
    assert pool.step([(0, num_rows)]) is not None
    step = pool.graph_step(num_rows)
    operands.fused(step, 1, linear)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = CopiedProduct(operands.y, given.y)
        if begun:
            step.base_product(1, linear, operands.x, product)
        else:
            product(operands.x)
        out = operands.fused(step, 1, linear)
    for seed, (mix, batch) in enumerate(
        [("distinct", num_rows), ("zipf", num_rows), ("identical", num_rows), ("uniform", num_rows - 5)]
    ):
        segments = make_mix(mix, batch, len(adapters), seed=seed, blends=BLENDS[seed % 3 :][:MAX_BLENDS])
        fresh = Operands.random(SMALL, linear, num_rows, dtype, seed)
        for target, rows in ((given.x, fresh.x), (given.y, fresh.y), (given.residual, fresh.residual)):
            target.copy_(rows)
        launched = pool.step(segments)
        assert launched is not None
        out.fill_(7.0)
        graph.replay()
        assert same_bits(given.residual[batch:], fresh.residual[batch:])
        assert (out[batch:] == 7.0).all()
        alone = Operands(fresh.x[:batch], fresh.y[:batch], fresh.residual[:batch], given.weight)
        assert same_bits(out[:batch], alone.fused(launched, 1, linear))
        assert same_bits(given.residual[:batch], alone.residual)


def test_nothing_beside_the_rows_is_written(small: tuple[RankPagePool, list[Adapter]]) -> None:
    """y may be a view of a larger buffer."""
    pool, adapters = small
    step = pool.step(make_mix("uniform", 16, len(adapters), seed=3))
    assert step is not None
    given = Operands.random(SMALL, "o_proj", 16, pool.pages.dtype, seed=1)
    width = given.y.shape[1]
    y_buffer, buffer = (
        torch.full((18, one), 7.0, dtype=given.y.dtype, device="cuda") for one in (width + 32, width)
    )
    y, residual = y_buffer[1:17, 16:-16], buffer[1:17]
    y.copy_(given.y)
    residual.copy_(given.residual)
    out = Operands(given.x, y, residual, given.weight).fused(step, 0, "o_proj")
    assert same_bits(out, given.fused(step, 0, "o_proj"))
    assert same_bits(residual, given.residual)
    for view in (y, residual):
        view.fill_(7.0)
    assert (y_buffer == 7.0).all()
    assert (buffer == 7.0).all()


def test_operands_that_do_not_fit_are_refused(small: tuple[RankPagePool, list[Adapter]]) -> None:
    step = small[0].step([(0, 4)])
    assert step is not None
    given = Operands.random(SMALL, "o_proj", 4, small[0].pages.dtype, seed=1)
    assert isinstance(given.weight, Tensor)
    strided = torch.cat((given.residual, given.residual), 1)[:, : given.y.shape[1]]
    with pytest.raises(RuntimeError, match="contiguous"):
        Operands(given.x, given.y, strided, given.weight).fused(step, 0, "o_proj")
    with pytest.raises(RuntimeError, match="does not fit rows of 72"):
        Operands(given.x, given.y, given.residual, given.weight[:64]).fused(step, 0, "o_proj")
