"""How numbers are scaled and rounded on their way into rank pages: all there are of 16 bits."""

import pytest
import torch
from torch import Tensor

from deltaplane_server.adapters.page_writes import PageWrites

SCALES = [1.0, 2.0, 0.5, 1 / 3, 1.7, -1.1, 0.1, 1e-30, 3e-6, 250.0]


def all_values(dtype: torch.dtype) -> Tensor:
    """The finite ones, [n, 16]."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return values[values.isfinite()].view(-1, 16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_is_computed_in_float32_and_rounded_once(
    dtype: torch.dtype, file_dtype: torch.dtype, scale: float
) -> None:
    b = all_values(file_dtype)
    pages = torch.full((2, 3, 8, len(b)), torch.nan, dtype=dtype)
    writes = PageWrites(pages.view(2, -1), is_filled=False)
    writes.add(pages[:, 1], b.T.view(2, 8, -1), scale)
    factor = torch.full((len(b),), scale)
    writes.add(pages[:, 2], b.T.view(2, 8, -1), factor)
    expected = (b.double() * torch.tensor(scale).double()).float().to(dtype).T
    writes.write()
    assert not writes.has_finite_sums() or expected.isfinite().all()
    assert pages[:, 0].eq(0).all()
    assert torch.equal(bits(pages[:, 1].reshape(16, -1)), bits(expected))
    assert torch.equal(bits(pages[:, 2].reshape(16, -1)), bits(expected))


def test_what_is_filled_is_written_once_and_nothing_beside_it() -> None:
    pages = torch.full((2, 12), torch.nan)
    writes = PageWrites(pages[:, 4:8], is_filled=True)
    writes.add(pages[:, 4:6], torch.ones(2, 2))
    writes.add(pages[:, 6:8], torch.ones(2, 2), 3.0)
    writes.write()
    assert writes.has_finite_sums()
    assert pages[:, 4:8].tolist() == [[1, 1, 3, 3]] * 2
    assert pages[:, :4].isnan().all()
    assert pages[:, 8:].isnan().all()


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_found(page: int, value: float) -> None:
    pages = torch.zeros(2, 8)
    writes = PageWrites(pages, is_filled=False)
    writes.add(pages[page, 3:4], torch.tensor([value]))
    writes.write()
    assert not writes.has_finite_sums()
