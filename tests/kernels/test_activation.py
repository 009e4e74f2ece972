import pytest
import torch

from deltaplane_kernels.activation import silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 7, 133])
def test_equals_its_equation(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(num_tokens, 2 * 48).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up[:, :48].double(), gate_up[:, 48:].double()

    y = silu_mul(gate_up)

    assert y.dtype == dtype
    assert y.is_contiguous()
    assert torch.equal(gate_up, before)
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), gate * gate.sigmoid() * up, rtol=2 * epsilon, atol=epsilon)


def test_refuses_an_odd_number_of_columns() -> None:
    with pytest.raises(ValueError, match="5 columns"):
        silu_mul(torch.randn(2, 5))
