"""DoRA and trained biases on the GPU: token for token transformers + PEFT; and the norms that DoRA takes."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaplane_server.config import EngineConfig
from deltaplane_server.models.base_weights import DecoderWeights
from deltaplane_server.models.config import load_decoder_config
from deltaplane_server.models.decoder import Decoder
from deltaplane_server.models.weights import Checkpoint
from e2e_reference import Reference
from in_process import Ask, in_process
from peft_factory import make_adapter, make_tiny_model

CUDA = torch.device("cuda")
NUM_TOKENS = 12

ADAPTERS: dict[str, dict[str, Any]] = {
    "dora-of-high-rank": {"rank": 63, "alpha": 20, "use_dora": True, "rslora": True},
    "dora-with-biases": {"rank": 7, "use_dora": True, "bias": "all", "modules": ["q_proj", "down_proj"]},
    "biases": {"rank": 16, "bias": "lora_only"},
    "biases-alone-in-some": {"rank": 3, "bias": "all", "modules": ["o_proj"], "layers_to_transform": [1]},
    "bias-on-b": {"rank": 8, "lora_bias": True, "modules": ["k_proj", "o_proj", "up_proj"]},
    "plain": {"rank": 12},
}


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2", {}), ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 64})],
)
@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")
def test_float32_equals_peft_in_one_batch(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Each adapter has an oracle of its own: with PEFT, trained biases change the base."""
    model = make_tiny_model(tmp_path, family, **options)
    adapters = {
        name: make_adapter(model, tmp_path / name, seed=seed, **kind)
        for seed, (name, kind) in enumerate(ADAPTERS.items())
    }
    rng = random.Random(family)
    asks = [
        Ask(name, [rng.randrange(256) for _ in range(length)], NUM_TOKENS)
        for length in (1, 17, 90)
        for name in ("", *adapters)
    ]
    config = EngineConfig(
        str(model),
        family,
        device="cuda",
        dtype="float32",
        max_loras=6,
        max_lora_rank=64,
        kv_cache_bytes=32 << 20,
    )
    with in_process(config, model, adapters) as engine:
        answers = [engine.ask_all(asks), [engine.ask_all([ask])[0] for ask in asks]]
    for name in ("", *adapters):
        oracle = Reference(model, {name: adapters[name]} if name else {}, device=CUDA)
        for number, ask in enumerate(asks):
            if ask.adapter == name:
                expected = oracle.greedy(ask.prompt, name, NUM_TOKENS).tokens
                assert [answer[number].tokens for answer in answers] == [expected, expected], name


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
def test_norms_are_those_of_the_whole_weight(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """Also of rows in which the delta takes all of the weight away, which have none."""
    model = make_tiny_model(tmp_path, "llama")
    checkpoint = Checkpoint.open(model)
    decoder = Decoder(load_decoder_config(model), checkpoint, dtype, CUDA)
    checkpoint.finish()
    base = DecoderWeights(decoder)
    weight = decoder.linear(1, "gate_up_proj").rows(128, 256).float().cpu()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(24, 64, generator=generator), torch.randn(128, 24, generator=generator) / 10
    a, b = torch.cat([a, weight[5:7]]), torch.cat([b, torch.zeros(128, 2)], 1)
    b[5:7] = 0
    b[5, 24] = b[6, 25] = -1
    expected = torch.linalg.vector_norm(weight.double() + b.double() @ a.double(), dim=1)
    for _ in range(2):
        norms = base.row_norms(1, "gate_up_proj", 1, a, b)
        assert norms[5:7].tolist() == [0.0, 0.0]
        torch.testing.assert_close(norms.double(), expected, rtol=tolerance, atol=0)
    assert base.bias(1, "gate_up_proj", 1).tolist() == [0.0] * 128
