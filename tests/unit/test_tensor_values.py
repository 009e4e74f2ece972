"""Whether values are finite, found by sums and bounds in place of a look at each."""

import pytest
import torch

from deltaplane_server.adapters.tensor_values import is_finite, scaled

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    tensor = torch.ones(3, 100, dtype=dtype)
    for place in range(tensor.numel()):
        tensor.view(-1)[place] = value
        assert not is_finite(tensor)
        assert not is_finite(tensor.T)
        assert not is_finite(tensor[:, place % 100])
        tensor.view(-1)[place] = 1
    assert is_finite(tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_that_cancel_are_found(dtype: torch.dtype) -> None:
    assert not is_finite(torch.tensor([torch.inf, -torch.inf, 1], dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_that_overflows_is_no_infinite_value(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full((1000,), largest, dtype=dtype))
    assert is_finite(torch.full((1000,), -largest, dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))


def test_a_tensor_that_stays_as_it_is_is_not_copied() -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert scaled(tensor, 1.0, torch.bfloat16) is tensor
    assert scaled(tensor, 1.0, torch.float32).tolist() == [1, 1]
