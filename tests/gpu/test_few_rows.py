"""The product of few rows in CUDA graphs against the product in float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from deltaplane_kernels.few_rows_cuda import (
    COLUMNS,
    GROUP,
    MAX_OUTPUTS,
    OUTPUTS,
    ROWS,
    SPLITS,
    FewRowLinear,
    Tiling,
    few_row_linear,
    is_able,
)
from deltaplane_kernels.linear import Linear
from gpu_lora_pools import TOLERANCES, random_rows, same_bits

pytestmark = pytest.mark.skipif(
    not is_able(torch.device("cuda")),
    reason="the kernels are for compute capability 9.0",
)

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(8, 64), (72, 192), (4160, 576), (96, 4160), (8192, 512), (20_008, 192)]
"""Outputs and inputs: one tile and many, several of a block, columns that fill no whole piece."""


def random_weight(
    shape: tuple[int, int], dtype: torch.dtype, with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    outputs, inputs = shape
    weight = random_rows(outputs, inputs, dtype, seed=1) * 0.1
    return weight, random_rows(1, outputs, dtype, seed=2)[0] if with_bias else None


def on_gpu(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.cuda(), None if bias is None else bias.cuda()


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, GROUP, GROUP + 1, 16, 33, ROWS - 1, ROWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_in_a_graph_equal_float64(dtype: torch.dtype, num_rows: int, with_bias: bool) -> None:
    for shape in SHAPES:
        weight, bias = random_weight(shape, dtype, with_bias)
        linear = few_row_linear(*on_gpu(weight, bias))
        assert linear is not None
        host_x = random_rows(num_rows, shape[1], dtype, seed=3)
        wide_x = torch.full((num_rows, shape[1] + 16), torch.nan, dtype=dtype, device="cuda")
        x = wide_x[:, 8:-8].copy_(host_x)
        buffer = torch.full((num_rows, shape[0] + 16), 7.0, dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x, None)
            assert linear(x, buffer[:, 8:-8]).data_ptr() == buffer[:, 8:-8].data_ptr()
        graph.replay()
        torch.testing.assert_close(
            y.cpu().double(), expected(host_x, weight, bias), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )
        assert same_bits(buffer[:, 8:-8], y)
        assert (buffer[:, :8] == 7).all()
        assert (buffer[:, -8:] == 7).all()


TILINGS = [
    Tiling(outputs, splits, blocks)
    for outputs, splits in product(OUTPUTS, SPLITS)
    if outputs // GROUP % splits == 0
    for blocks in ([1, 2, 5, 6] if splits == 1 else [-(-520 // outputs) * splits])
]


@pytest.mark.parametrize("num_rows", [3, 11, ROWS])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_gives_the_product_in_a_graph(tiling: Tiling, num_rows: int) -> None:
    """520 outputs are several tiles of a block, or parts of columns of the blocks of a cluster."""
    for dtype in DTYPES:
        weight, bias = random_weight((520, SPLITS[-1] * COLUMNS + 64), dtype, with_bias=True)
        x = random_rows(num_rows, weight.shape[1], dtype, seed=3)
        y = in_a_graph(FewRowLinear(*on_gpu(weight, bias), tiling), x.cuda())
        torch.testing.assert_close(
            y.cpu().double(), expected(x, weight, bias), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )


@pytest.mark.parametrize("num_rows", [3, ROWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_in_a_graph_one_after_the_other_see_what_the_one_before_wrote(
    dtype: torch.dtype, num_rows: int
) -> None:
    """Each may start while the one before it ends. y = (W x + b) again and again, in and out of place."""
    weight, bias = random_weight((2048, 2048), dtype, with_bias=True)
    weight = weight * 0.2
    linear = few_row_linear(*on_gpu(weight, bias))
    assert linear is not None
    host = random_rows(num_rows, 2048, dtype, seed=3)
    x = host.cuda()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(6):
            y = linear(y, None)
    results = []
    for _ in range(5):
        graph.replay()
        results.append(y.clone())
    for _ in range(6):
        host = expected(host, weight, bias).to(dtype)
    torch.testing.assert_close(y.cpu().float(), host.float(), rtol=0.05, atol=0.05 * float(host.abs().max()))
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("num_rows", [GROUP, ROWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_in_a_graph_does_not_depend_on_those_beside_it(dtype: torch.dtype, num_rows: int) -> None:
    weight, _ = random_weight((64, 576), dtype, with_bias=False)
    linear = few_row_linear(weight.cuda(), None)
    assert linear is not None
    x = random_rows(num_rows, 576, dtype, seed=4).cuda()
    x[1::2] = torch.inf
    all_rows, alone = in_a_graph(linear, x), in_a_graph(linear, x[:1])
    assert same_bits(all_rows[:1], alone)
    assert all_rows[::2].isfinite().all()
    assert not all_rows[1::2].isfinite().any()


def in_a_graph(linear: FewRowLinear | Linear, x: Tensor) -> Tensor:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, None)
    graph.replay()
    return y.clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linears_take_the_kernel_for_few_rows_in_graphs(dtype: torch.dtype) -> None:
    weight, bias = on_gpu(*random_weight((96, 4160), dtype, with_bias=True))
    kernel, linear = few_row_linear(weight, bias), Linear(weight, bias)
    assert kernel is not None
    for num_rows in (1, GROUP, ROWS):
        x = random_rows(num_rows, 4160, dtype, seed=num_rows).cuda()
        assert same_bits(in_a_graph(linear, x), in_a_graph(kernel, x))
    x = random_rows(ROWS + 1, 4160, dtype, seed=5).cuda()
    outside = linear(x)  # before the capture, in which cuBLAS could not be set up
    torch.testing.assert_close(in_a_graph(linear, x), outside)


def test_other_weights_are_left_to_others() -> None:
    def on_device(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(outputs, inputs, dtype=dtype, device="cuda")

    for dtype, (outputs, inputs) in product(DTYPES, ((36, 64), (64, 72), (MAX_OUTPUTS + 8, 64))):
        assert few_row_linear(on_device(outputs, inputs, dtype), None) is None
    assert few_row_linear(on_device(64, 64, torch.float32), None) is None
    assert few_row_linear(on_device(64, 128, torch.bfloat16)[:, :64], None) is None
