import pytest
import torch

from deltaplane_kernels.argmax import argmax


def test_the_first_of_the_highest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-2.0, -5.0, -9.0]])
    assert argmax(logits).tolist() == [1, 0]


def test_writes_where_it_is_told() -> None:
    out = torch.empty(2, dtype=torch.int64)
    assert argmax(torch.eye(2, dtype=torch.bfloat16), out) is out
    assert out.tolist() == [0, 1]


def test_refuses_what_does_not_fit() -> None:
    for logits in (torch.zeros(4), torch.zeros(2, 4)[:, ::2]):
        with pytest.raises(ValueError, match="must be contiguous rows"):
            argmax(logits)
    with pytest.raises(ValueError, match=r"out \(3,\) does not fit logits \(2, 4\)"):
        argmax(torch.zeros(2, 4), torch.empty(3, dtype=torch.int64))
