"""The elementwise kernels on Triton's interpreter; test_ops_triton.py runs this file."""

import pytest
import torch

from deltaplane_kernels import activation_triton, argmax_triton, norm_triton, rotary_triton
from deltaplane_kernels.activation import silu_mul
from deltaplane_kernels.attention import AttentionPlan, rotary_write_kv
from deltaplane_kernels.attention_index import build_index
from deltaplane_kernels.norm import add_rms_norm, rms_norm
from deltaplane_kernels.rotary import apply_rotary, rotary_factors
from paged_cases import PAGE, make_case

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16]


def tolerance(dtype: torch.dtype) -> float:
    """Two roundings of a value near 1."""
    return 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 576), (3, 4, 16), (0, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    y = norm_triton.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y, rms_norm(x, weight, 1e-5), rtol=tolerance(dtype), atol=1e-6)


def test_rms_norm_reads_views() -> None:
    view, weight = torch.randn(5, 6, 16)[:, 1:4], torch.rand(16)
    y = norm_triton.rms_norm(view, weight, 1e-5)
    torch.testing.assert_close(y, rms_norm(view, weight, 1e-5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 96), (5, 96), (96,)))
    expected_residual = residual.clone()
    expected = add_rms_norm(x, expected_residual, weight, 1e-5)
    out = torch.empty_like(x)
    assert norm_triton.add_rms_norm(x, residual, weight, 1e-5, out) is out
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out, expected, rtol=tolerance(dtype), atol=1e-6)


def test_norms_refuse_shapes_that_do_not_fit() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(RuntimeError, match=r"weight \(31,\) does not fit rows of 32"):
        norm_triton.rms_norm(x, torch.ones(31), 1e-5)
    with pytest.raises(RuntimeError, match="of one shape"):
        norm_triton.add_rms_norm(x, torch.randn(3, 32), torch.ones(32), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 48), (1, 1500), (0, 16)])
def test_silu_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_tokens, 2 * size).to(dtype)
    y = activation_triton.silu_mul(gate_up)
    torch.testing.assert_close(y, silu_mul(gate_up), rtol=tolerance(dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(3, 10_000), (2, 4096), (1, 7), (0, 16)])
def test_argmax_takes_the_first_of_the_highest(num_rows: int, size: int, dtype: torch.dtype) -> None:
    logits = torch.randint(0, 50, (num_rows, size)).to(dtype) - 100
    out = torch.empty(num_rows, dtype=torch.int64)
    assert argmax_triton.argmax(logits, out) is out
    assert out.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_argmax_is_a_column_of_the_row_whatever_stands_there() -> None:
    logits = torch.full((3, 5000), -torch.inf)
    logits[1, 4999] = -1e30
    logits[2] = torch.nan
    assert argmax_triton.argmax(logits, torch.empty(3, dtype=torch.int64)).tolist() == [0, 4999, 0]


@pytest.mark.parametrize("head_dim", [16, 96])
def test_rotary_factors(head_dim: int) -> None:
    positions = torch.tensor([0, 1, 17, 4000], dtype=torch.int32)
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    factors = rotary_triton.rotary_factors(positions, inv_freq, 1.3, torch.float32)
    for factor, expected in zip(
        factors, rotary_factors(positions, inv_freq, 1.3, torch.float32), strict=True
    ):
        torch.testing.assert_close(factor, expected, rtol=0, atol=1e-6)


def test_apply_rotary_turns_a_view_and_nothing_beside_it() -> None:
    packed, angles = torch.randn(5, 11, 16), torch.randn(5, 1, 8)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    expected = packed.clone()
    apply_rotary(expected[:, :9], cos, sin)
    rotary_triton.apply_rotary(packed[:, :9], cos, sin)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [(3, 16), (1, 96)])
def test_rotary_write_kv(group: int, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([(14, 4), (3, 1), (0, 2)], group=group, head_dim=head_dim, dtype=dtype)
    case.forget_step()
    index = build_index(case.runs, page_size=PAGE, num_kv_heads=2, device=CPU)
    plan = AttentionPlan(case.runs, layout=case.layout, windows=[None], dtype=dtype, device=CPU)
    inv_freq = torch.rand(head_dim // 2)
    cos, sin = rotary_factors(index.positions, inv_freq, 1.0, dtype)
    heads, pages = case.packed.clone(), case.kv._base
    assert pages is not None
    expected_pages = pages.clone()

    rotary_write_kv(heads, cos, sin, expected_pages[:, 1], plan)
    rotary_triton.rotary_write_kv(case.packed, cos, sin, case.kv, index.slots)

    atol = 0.0 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=atol, equal_nan=True)
    torch.testing.assert_close(case.queries, heads[:, : -2 * 2], rtol=0, atol=atol)


def test_write_kv_skips_rows_of_padding() -> None:
    kv, keys_values = torch.zeros(3, 2, 2, PAGE, 16), torch.randn(3, 4, 16)
    rotary_triton.write_kv(kv, keys_values, torch.tensor([17, -1, 0], dtype=torch.int32))
    expected = torch.zeros_like(kv)
    expected[1, :, :, 1], expected[0, :, :, 0] = keys_values[0].view(2, 2, 16), keys_values[2].view(2, 2, 16)
    assert torch.equal(kv, expected)


def test_rotary_refuses_shapes_that_do_not_fit() -> None:
    factors = torch.ones(5, 1, 16), torch.ones(5, 1, 16)
    with pytest.raises(RuntimeError, match="do not fit heads"):
        rotary_triton.apply_rotary(torch.randn(4, 2, 16), *factors)
    with pytest.raises(RuntimeError, match="must lie side by side"):
        rotary_triton.apply_rotary(torch.randn(5, 4, 16)[:, ::2], *factors)
    kv, slots = torch.zeros(3, 2, 2, PAGE, 16), torch.zeros(5, dtype=torch.int32)
    for shape in ((4, 4, 16), (5, 3, 16), (5, 4, 32)):
        with pytest.raises(RuntimeError, match="do not fit 5 tokens of kv"):
            rotary_triton.write_kv(kv, torch.randn(shape), slots)
    with pytest.raises(RuntimeError, match="do not fit 5 tokens of kv"):
        rotary_triton.rotary_write_kv(torch.randn(5, 3, 16), *factors, kv, slots)
