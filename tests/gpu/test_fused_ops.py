"""The elementwise kernels on the GPU, against the torch references on the CPU.

Both round at the same places; what is left are the last bits of float32 sums and functions, which move an
output in half precision by one unit in the last place at most at each of two roundings, and a float32 one by
less than 1e-5 of it.
"""

import pytest
import torch
from torch import Tensor

from deltaplane_kernels.activation import silu_mul
from deltaplane_kernels.argmax import argmax
from deltaplane_kernels.attention import AttentionPlan, TokenRun, rotary_write_kv, write_kv
from deltaplane_kernels.linear import Linear
from deltaplane_kernels.norm import add_rms_norm, rms_norm
from deltaplane_kernels.rotary import apply_rotary, rotary_factors
from paged_cases import PagedCase, fixed_plan, make_case

GPU = torch.device("cuda")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(actual: Tensor, expected: Tensor) -> None:
    epsilon = max(torch.finfo(expected.dtype).eps, 4e-6)
    torch.testing.assert_close(actual.cpu(), expected, rtol=2 * epsilon, atol=4 * epsilon, equal_nan=True)


@pytest.mark.parametrize(
    "shape", [(1, 4096), (7, 576), (133, 4096), (3, 16384), (0, 64), (5, 32, 128), (3, 2, 2, 96)]
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.rand(shape[-1]).to(dtype)
    close(rms_norm(x.to(GPU), weight.to(GPU), 1e-5), rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_in_packed_rows(dtype: torch.dtype) -> None:
    packed, weight = torch.randn(9, 12, 128).to(dtype), torch.rand(128).to(dtype)
    close(rms_norm(packed.to(GPU)[:, 8:10], weight.to(GPU), 1e-6), rms_norm(packed[:, 8:10], weight, 1e-6))


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4096), (7, 576), (2000, 4096), (3, 896), (0, 64)])
def test_add_rms_norm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, num_tokens, size).to(dtype)
    weight = torch.rand(size).to(dtype)
    device_residual = residual.to(GPU)
    y = add_rms_norm(x.to(GPU), device_residual, weight.to(GPU), 1e-5)
    close(y, add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(device_residual.cpu(), residual)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 14336), (7, 1536), (2000, 14336), (3, 48), (0, 64)])
def test_silu_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_tokens, 2 * size).to(dtype)
    close(silu_mul(gate_up.to(GPU)), silu_mul(gate_up))


@pytest.mark.parametrize(("num_rows", "size"), [(1, 128256), (64, 128256), (3, 4096), (7, 50257), (0, 64)])
def test_argmax(num_rows: int, size: int, dtype: torch.dtype) -> None:
    logits = torch.randint(-100, 100, (num_rows, size)).to(dtype)
    out = torch.full((num_rows,), -1, device=GPU)
    assert argmax(logits.to(GPU), out) is out
    assert torch.equal(out.cpu(), argmax(logits))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 32, 33, 64, 128, 129])
def test_linear(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    """On both BLAS libraries. Sums of products of unit variance, divided by their number's root."""
    weight, x = (torch.randn(576, 1536) / 1536**0.5).to(dtype), torch.randn(num_rows, 1536).to(dtype)
    bias = torch.randn(576).to(dtype) if has_bias else None
    linear = Linear(weight.to(GPU), None if bias is None else bias.to(GPU))
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    out = torch.full((num_rows, 576), torch.nan, dtype=dtype, device=GPU)
    assert linear(x.to(GPU), out) is out
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for y in (out, linear(x.to(GPU))):
        torch.testing.assert_close(y.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_rotary(head_dim: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 17, 4000, 8191, 100_000])
    inv_freq = 1.0 / (500_000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    factors = rotary_factors(positions, inv_freq, 1.1, dtype)
    for actual, expected in zip(
        rotary_factors(positions.to(GPU), inv_freq.to(GPU), 1.1, dtype), factors, strict=True
    ):
        close(actual, expected)
    packed = torch.randn(6, 11, head_dim).to(dtype)
    on_device = packed.to(GPU)
    apply_rotary(packed[:, :9], *factors)
    apply_rotary(on_device[:, :9], *(factor.to(GPU) for factor in factors))
    close(on_device, packed)


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim"), [(8, 4, 128), (2, 7, 64), (3, 1, 96), (1, 8, 256)]
)
def test_rotary_write_kv(num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    case = written_case(num_kv_heads, group, head_dim, dtype)
    cos, sin = turns(case)
    heads, kv = case.packed.to(GPU), on_gpu(case)
    rotary_write_kv(heads, cos.to(GPU), sin.to(GPU), kv, plan_of(case, GPU))
    rotary_write_kv(case.packed, cos, sin, case.kv, plan_of(case, CPU))
    close(heads[:, : -2 * num_kv_heads], case.queries)
    close(kv._base, case.kv._base)  # type: ignore[arg-type]


def test_write_kv(dtype: torch.dtype) -> None:
    case = written_case(2, 3, 96, dtype)
    keys_values, kv = case.packed[:, -4:], on_gpu(case)
    write_kv(kv, keys_values.to(GPU), plan_of(case, GPU))
    write_kv(case.kv, keys_values, plan_of(case, CPU))
    torch.testing.assert_close(kv._base.cpu(), case.kv._base, rtol=0, atol=0, equal_nan=True)  # type: ignore[union-attr]


def test_a_graph_writes_to_the_places_of_its_step(dtype: torch.dtype) -> None:
    case = written_case(2, 4, 64, dtype)
    plan = fixed_plan(4, 4, 8, case.layout, None, GPU, decodes_alone=True)
    heads, kv = torch.randn(4, 12, 64, device=GPU).to(dtype), on_gpu(case)
    cos, sin = torch.ones(4, 1, 64, device=GPU, dtype=dtype), torch.zeros(4, 1, 64, device=GPU, dtype=dtype)
    rotary_write_kv(heads, cos, sin, kv, plan)  # compiles; all rows are padding
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary_write_kv(heads, cos, sin, kv, plan)
    for places in ([(0, 0)], [(2, 5), (1, 15), (3, 0)], [(3, 9), (2, 8), (1, 7), (0, 6)]):
        before = kv.clone()
        plan.fill([TokenRun(slot, 1, [page]) for page, slot in places])
        graph.replay()
        for row, (page, slot) in enumerate(places):
            before[page, :, :, slot] = heads[row, -4:].view(2, 2, 64)
        torch.testing.assert_close(kv, before, rtol=0, atol=0, equal_nan=True)


def written_case(num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> PagedCase:
    """Pages without the step's own keys and values."""
    spans = [(14, 4), (3, 1), (0, 2), (31, 1), (100, 200)]
    case = make_case(spans, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    case.forget_step()
    return case


def on_gpu(case: PagedCase) -> Tensor:
    """The layer, in pages on the GPU."""
    pages = case.kv._base
    assert pages is not None
    return pages.to(GPU)[:, 1]


def turns(case: PagedCase) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(run.start, run.end) for run in case.runs])
    half = case.layout.head_dim // 2
    return rotary_factors(positions, 10000.0 ** (-torch.arange(half) / half), 1.0, case.kv.dtype)


def plan_of(case: PagedCase, device: torch.device) -> AttentionPlan:
    return AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=case.kv.dtype, device=device)
