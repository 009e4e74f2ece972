import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from deltaplane_kernels.norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 4, 16)])
def test_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = LlamaRMSNorm(shape[-1], eps=1e-5)
    reference.weight.data = torch.randn(shape[-1]).to(dtype)
    x = (torch.randn(shape) * 3).to(dtype)

    y = rms_norm(x, reference.weight.data, 1e-5)

    assert y.dtype == dtype
    torch.testing.assert_close(y, reference(x).detach(), rtol=0, atol=1e-6)


def test_leaves_its_input_alone() -> None:
    x = torch.randn(3, 8)
    before = x.clone()
    rms_norm(x, torch.ones(8), 1e-5)
    assert torch.equal(x, before)


def test_reads_views() -> None:
    packed = torch.randn(5, 6, 16)
    view = packed[:, 1:4]
    assert torch.equal(rms_norm(view, torch.ones(16), 1e-6), rms_norm(view.clone(), torch.ones(16), 1e-6))


def test_adds_to_the_residual_first() -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    total = x + residual
    expected = rms_norm(total, weight, 1e-5)

    y = add_rms_norm(x, residual, weight, 1e-5)

    assert torch.equal(residual, total)
    assert torch.equal(y, expected)


def test_refuses_a_weight_of_another_size() -> None:
    with pytest.raises(RuntimeError):
        rms_norm(torch.randn(4, 32), torch.ones(31), 1e-5)
