import pytest
import torch

from deltaplane_kernels.linear import Linear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, 256])
def test_equals_the_product(num_tokens: int, dtype: torch.dtype, tolerance: float, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(96, 80) / 80**0.5).to(dtype)
    bias = torch.randn(96).to(dtype) if has_bias else None
    x = torch.randn(num_tokens, 80).to(dtype)
    before = x.clone()

    y = Linear(weight, bias)(x)

    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert y.dtype == dtype
    assert torch.equal(x, before)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [None, torch.ones(24)])
@pytest.mark.parametrize("blocked", [False, True])
def test_writes_where_it_is_told(
    bias: torch.Tensor | None, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if not blocked:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    linear, x = Linear(torch.randn(24, 16), bias), torch.randn(5, 16)
    out = torch.full((5, 24), torch.nan)
    assert linear(x, out) is out
    torch.testing.assert_close(out, linear(x))


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_the_weight(dtype: torch.dtype, blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if not blocked:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, x = torch.randn(24, 16).to(dtype), torch.randn(5, 16).to(dtype)
    linear = Linear(weight, torch.ones(24).to(dtype))
    assert torch.equal(linear.rows(8, 21), weight[8:21])
    torch.testing.assert_close(linear.product(x, 8, 21), x @ weight[8:21].T)
    assert linear.bias is not None


def test_reads_rows_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    linear = Linear(torch.randn(24, 16))
    wide = torch.randn(5, 40)
    assert torch.equal(linear(wide[:, 8:24]), linear(wide[:, 8:24].contiguous()))


def test_a_row_depends_on_itself_alone() -> None:
    torch.manual_seed(0)
    linear = Linear(torch.randn(24, 16))
    x = torch.randn(9, 16)
    before = linear(x)[4].clone()
    x[:4] = torch.nan
    assert torch.equal(linear(x)[4], before)


@pytest.mark.parametrize("bias", [torch.zeros(3), torch.zeros(24, 1)])
def test_refuses_a_bias_that_does_not_fit(bias: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"weight \(24, 16\) and bias"):
        Linear(torch.zeros(24, 16), bias)
