"""Norms of base weights with a delta, and biases, where a decoder has them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltaplane_kernels import linear
from deltaplane_server.models import base_weights
from deltaplane_server.models.base_weights import DecoderWeights
from deltaplane_server.models.config import load_decoder_config
from deltaplane_server.models.decoder import Decoder
from deltaplane_server.models.weights import Checkpoint
from peft_factory import make_tiny_model

LINEARS = {
    ("qkv_proj", 0): "self_attn.q_proj",
    ("qkv_proj", 1): "self_attn.k_proj",
    ("qkv_proj", 2): "self_attn.v_proj",
    ("o_proj", 0): "self_attn.o_proj",
    ("gate_up_proj", 0): "mlp.gate_proj",
    ("gate_up_proj", 1): "mlp.up_proj",
    ("down_proj", 0): "mlp.down_proj",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.model.layers.named_parameters())


@pytest.fixture(params=[True, False], ids=["blocked", "row-major"])
def layouts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in which a CPU keeps a weight."""
    if not request.param:
        monkeypatch.setattr(linear, "_can_block", lambda weight: False)


def weights(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    decoder = Decoder(load_decoder_config(folder), Checkpoint.open(folder), dtype, torch.device("cpu"))
    return DecoderWeights(decoder)


def delta(out: int, width: int, rank: int = 5, size: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out + rank)
    return torch.randn(rank, width, generator=generator), torch.randn(out, rank, generator=generator) * size


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_norms_are_those_of_the_whole_weight(
    folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype, tolerance: float
) -> None:
    base = weights(folder, dtype)
    for layer, (place, module) in [(layer, item) for layer in (1, 0) for item in LINEARS.items()]:
        weight = tensors[f"{layer}.{module}.weight"].to(dtype)
        a, b = delta(*weight.shape)
        expected = torch.linalg.vector_norm(weight.double() + b.double() @ a.double(), dim=1)
        for _ in range(2):
            norms = base.row_norms(layer, *place, a, b)
            assert norms.dtype is torch.float32
            torch.testing.assert_close(norms.double(), expected, rtol=tolerance, atol=0)


@pytest.mark.usefixtures("layouts")
def test_rows_in_which_the_delta_cancels_the_weight_are_exact(
    folder: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delta is the weight itself, with the sign turned: of one row all but a thousandth, of the others
    all. More rows than are made at once."""
    monkeypatch.setattr(base_weights, "_EXACT_ROWS", 7)
    weight = tensors["0.self_attn.k_proj.weight"]
    out, _ = weight.shape
    b = -torch.eye(out)
    b[3, 3] = -0.999
    norms = weights(folder).row_norms(0, "qkv_proj", 1, weight, b)
    assert norms[3].item() == pytest.approx(weight[3].norm().item() / 1000, rel=1e-4)
    norms[3] = 0
    assert norms.tolist() == [0.0] * out


def test_a_delta_that_is_not_finite_has_no_norm(folder: Path) -> None:
    a, b = delta(64, 64)
    b[2, 0] = torch.nan
    norms = weights(folder).row_norms(0, "o_proj", 0, a, b)
    assert norms.isnan().nonzero().tolist() == [[2]]


def test_biases(folder: Path, tensors: dict[str, Tensor]) -> None:
    base = weights(folder)
    for (name, index), module in LINEARS.items():
        own = tensors.get(f"1.{module}.bias")
        bias = base.bias(1, name, index)
        if own is None:
            assert bias.tolist() == [0.0] * len(tensors[f"1.{module}.weight"])
        else:
            assert torch.equal(bias, own)
    assert torch.equal(weights(folder, torch.bfloat16).bias(0, "qkv_proj", 0), own_bias(tensors).float())


def own_bias(tensors: dict[str, Tensor]) -> Tensor:
    return tensors["0.self_attn.q_proj.bias"].bfloat16()
