"""Deltas in graphs beside the products that a decoder adds them to, behind the norms that make their x."""

import pytest
import torch

from deltaplane_kernels.few_rows_cuda import ROWS, is_able
from deltaplane_kernels.layout import PackedLinear
from deltaplane_kernels.linear import Linear
from deltaplane_kernels.lora import LoraStep, RankPagePool
from deltaplane_kernels.lora_norm_cuda import MAX_ROWS
from deltaplane_kernels.lora_segments import Slots
from deltaplane_kernels.norm import rms_norm
from gpu_lora_pools import (
    BLENDS,
    EPS,
    MAX_BLENDS,
    MEMBERS,
    TOLERANCES,
    filled_pool,
    make_adapters,
    norm_of,
    random_rows,
    same_bits,
)
from lora_cases import BASE, Adapter, add_delta_by_loop, make_layout, make_mix

DTYPES = [torch.bfloat16, torch.float16]
LAYOUT = make_layout(hidden=1024, kv=256, intermediate=2048)
REPLAYS = 3


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def pool(request: pytest.FixtureRequest) -> tuple[RankPagePool, list[Adapter]]:
    adapters = make_adapters(LAYOUT, request.param)
    return filled_pool(LAYOUT, adapters, request.param, MEMBERS), adapters


class Adapted:
    """A linear in a graph: x is the norm of `hidden`, y the product of x and its delta, `before` without it.

    Where the delta goes on to a norm, `residual` is what y was added to, `given` at first.
    """

    def __init__(self, layer: int, linear: PackedLinear, num_rows: int, dtype: torch.dtype) -> None:
        self.layer = layer
        self.linear = linear
        self.base = Linear(
            random_rows(linear.out_features, linear.in_features, dtype, layer).mul_(0.03).cuda()
        )
        self.ends_in_norm = len(linear.slices) == 1
        self.hidden = torch.zeros(num_rows, linear.in_features, dtype=dtype, device="cuda")
        self.given = torch.zeros(num_rows, linear.out_features, dtype=dtype, device="cuda")
        self.residual = torch.zeros_like(self.given)
        self.ones = torch.ones(linear.in_features, dtype=dtype, device="cuda")
        self.weight = torch.ones(linear.out_features, dtype=dtype, device="cuda")

    def run(self, step: LoraStep) -> None:
        """x is written by a kernel that lets the next ones start before it ends, as all of a decode do."""
        self.x = rms_norm(self.hidden, self.ones, EPS)
        place = self.layer, self.linear.name
        self.y = step.base_product(*place, self.x, self.base)
        if self.ends_in_norm:
            self.normed = step.add_delta_rms_norm(*place, self.x, self.y, self.residual, self.weight, EPS)
        else:
            step.add_delta(*place, self.x, self.y)

    def run_base(self) -> None:
        self.before = self.base(self.x)

    def check(self, adapters: list[Adapter], segments: list[tuple[Slots, int]], batch: int) -> None:
        """batch: rows of the step; the graph may have more."""
        padded = [*segments, *[(BASE, 1)] * (len(self.x) - batch)]
        expected = add_delta_by_loop(
            adapters, padded, self.layer, self.linear, self.x.cpu(), self.before.cpu()
        )
        tolerance = TOLERANCES[self.x.dtype]
        if not self.ends_in_norm:
            torch.testing.assert_close(self.y.cpu().double(), expected, rtol=tolerance, atol=tolerance)
            return
        residual, sums = self.residual.cpu(), self.given.cpu().double() + expected
        torch.testing.assert_close(
            residual.double()[:batch], sums[:batch], rtol=2 * tolerance, atol=2 * tolerance
        )
        if len(self.x) <= MAX_ROWS:  # by a kernel that leaves the rows of no step
            assert same_bits(self.residual[batch:], self.given[batch:])
        normed = norm_of(residual, self.weight.cpu())
        torch.testing.assert_close(self.normed.cpu()[:batch], normed[:batch], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 7, 16, 33, ROWS, ROWS + 32])
def test_each_step_of_a_graph_has_its_own_deltas(
    pool: tuple[RankPagePool, list[Adapter]], num_rows: int
) -> None:
    """A shrink that does not wait for x, or that of another replay, has those of other inputs."""
    lora, adapters = pool
    dtype = lora.pages.dtype
    linears = [
        Adapted(layer, linear, num_rows, dtype)
        for layer in range(LAYOUT.num_layers)
        for linear in LAYOUT.linears
    ]
    assert lora.step([(0, num_rows)]) is not None
    step = lora.graph_step(num_rows)
    for one in linears:
        one.run(step)
        one.run_base()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert linears[0].base.can_announce(num_rows) == (num_rows <= ROWS and is_able(lora.pages.device))
        for one in linears:
            one.residual.copy_(one.given)
        for one in linears:  # nothing in between that would wait for the end of what is ahead
            one.run(step)
        for one in linears:
            one.run_base()
    for seed, mix in enumerate(("distinct", "zipf", "identical", "uniform")):
        batch = max(1, num_rows - 5) if mix == "uniform" else num_rows
        segments = make_mix(mix, batch, len(adapters), seed=seed, blends=BLENDS[seed % 3 :][:MAX_BLENDS])
        for replay in range(REPLAYS):
            for one in linears:
                one.hidden.copy_(random_rows(num_rows, one.linear.in_features, dtype, 100 * seed + replay))
                one.given.copy_(random_rows(num_rows, one.linear.out_features, dtype, 200 * seed + replay))
            if lora.step(segments) is None:
                assert all(slot == BASE for slot, _ in segments)
                break
            graph.replay()
        else:
            for one in linears:
                one.check(adapters, segments, batch)
