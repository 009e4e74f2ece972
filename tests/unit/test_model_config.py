"""Reading a model's config: what is served, and that everything else is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.layout import LinearSlice, PackedLinear
from deltaplane_server.models.config import DecoderConfig, load_decoder_config

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[type[PretrainedConfig], str] = {
    LlamaConfig: "LlamaForCausalLM",
    MistralConfig: "MistralForCausalLM",
    Qwen2Config: "Qwen2ForCausalLM",
    Qwen3Config: "Qwen3ForCausalLM",
}


def save(folder: Path, family: type[PretrainedConfig] = LlamaConfig, **options: Any) -> Path:
    config = family(**{**SIZES, **options})
    config.architectures = [ARCHITECTURES[family]]
    config.save_pretrained(folder)
    return folder


def edit(folder: Path, **changes: Any) -> Path:
    """Writes keys into config.json that transformers' classes would not take or would change."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def load(folder: Path, family: type[PretrainedConfig] = LlamaConfig, **options: Any) -> DecoderConfig:
    return load_decoder_config(save(folder, family, **options))


def refusal(folder: Path, max_model_len: int | None = None) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        load_decoder_config(folder, max_model_len)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_sizes(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.architecture, config.num_layers, config.head_dim) == ("LlamaForCausalLM", 3, 12)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 48, 80)
    assert (config.num_heads, config.num_kv_heads, config.max_model_len) == (4, 2, 128)
    assert config.windows == (None, None, None)


def test_head_dim_is_independent_of_hidden_size(tmp_path: Path) -> None:
    layout = load(tmp_path, Qwen3Config, head_dim=32).adapter_layout()
    assert layout.num_layers == 3
    assert layout.linears == (
        PackedLinear(
            "qkv_proj",
            48,
            (
                LinearSlice("self_attn.q_proj", 128),
                LinearSlice("self_attn.k_proj", 64),
                LinearSlice("self_attn.v_proj", 64),
            ),
        ),
        PackedLinear("o_proj", 128, (LinearSlice("self_attn.o_proj", 48),)),
        PackedLinear("gate_up_proj", 48, (LinearSlice("mlp.gate_proj", 80), LinearSlice("mlp.up_proj", 80))),
        PackedLinear("down_proj", 80, (LinearSlice("mlp.down_proj", 48),)),
    )


def test_what_is_outside_the_linears(tmp_path: Path) -> None:
    outside = load(tmp_path, Qwen3Config, head_dim=32, tie_word_embeddings=True).adapter_layout().outside
    assert outside is not None
    assert (outside.vocab_size, outside.hidden_size, outside.is_tied) == (100, 48, True)
    assert outside.norms == {
        **{
            f"layers.{layer}.{norm}": size
            for layer in range(3)
            for norm, size in {
                "input_layernorm": 48,
                "post_attention_layernorm": 48,
                "self_attn.q_norm": 32,
                "self_attn.k_norm": 32,
            }.items()
        },
        "norm": 48,
    }


@pytest.mark.parametrize(
    ("family", "options", "biases", "qk_norm"),
    [
        (LlamaConfig, {}, (False, False, False), False),
        (LlamaConfig, {"attention_bias": True}, (True, True, False), False),
        (LlamaConfig, {"mlp_bias": True}, (False, False, True), False),
        (MistralConfig, {}, (False, False, False), False),
        (Qwen2Config, {}, (True, False, False), False),
        (Qwen3Config, {}, (False, False, False), True),
        (Qwen3Config, {"attention_bias": True}, (True, True, False), True),
    ],
)
def test_biases_and_norms(
    tmp_path: Path,
    family: type[PretrainedConfig],
    options: dict[str, Any],
    biases: tuple[bool, bool, bool],
    qk_norm: bool,
) -> None:
    config = load(tmp_path, family, **options)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == qk_norm
    assert [config.has_bias(name) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")] == [
        *biases,
        biases[2],
    ]


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        (MistralConfig, {"sliding_window": 64}, (64, 64, 64)),
        (MistralConfig, {"sliding_window": None}, (None, None, None)),
        (Qwen2Config, {"sliding_window": 64}, (None, None, None)),
        (
            Qwen2Config,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            (None, None, 64),
        ),
        (
            Qwen3Config,
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, None, 64),
        ),
    ],
)
def test_windows(
    tmp_path: Path,
    family: type[PretrainedConfig],
    options: dict[str, Any],
    windows: tuple[int | None, ...],
) -> None:
    assert load(tmp_path, family, **options).windows == windows


def test_default_rope_is_the_formula(tmp_path: Path) -> None:
    rope = load(tmp_path, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}).rope
    assert rope.inv_freq == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert rope.scaling == 1.0


@pytest.mark.parametrize("eos", [7, [7, 9]])
def test_generation_config_has_the_last_word_on_eos(tmp_path: Path, eos: int | list[int]) -> None:
    save(tmp_path)
    assert load_decoder_config(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_decoder_config(tmp_path).eos_token_ids == ({7} if eos == 7 else {7, 9})


def test_a_model_without_eos(tmp_path: Path) -> None:
    assert load(tmp_path, eos_token_id=None).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, "model_type 'mistral'"),
        ({"architectures": None}, "names no architecture"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    message = refusal(edit(save(tmp_path), **changes))
    assert named in message
    for served in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert served in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"is_causal": False}, "is_causal"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3 KV heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 13}, "even rotary dimension"),
        (
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope scaling 'proportional'",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
    ],
)
def test_features_that_are_not_exact_are_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(edit(save(tmp_path), **changes))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        (Qwen2Config, {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        (MistralConfig, {"layer_types": ["full_attention"] * 3}, "transformers takes for 'ministral'"),
        (MistralConfig, {"sliding_window": 0}, "sliding_window 0"),
    ],
)
def test_windows_that_are_not_exact_are_refused(
    tmp_path: Path, family: type[PretrainedConfig], changes: dict[str, Any], named: str
) -> None:
    assert named in refusal(edit(save(tmp_path, family), **changes))


@pytest.mark.parametrize(
    ("content", "named"), [("{", "cannot be read"), ("[1]", "not a JSON object"), (None, "cannot be read")]
)
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str | None, named: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    message = refusal(tmp_path)
    assert named in message
    assert "config.json" in message


def test_a_config_with_a_field_of_the_wrong_type(tmp_path: Path) -> None:
    assert "not a config of LlamaForCausalLM" in refusal(edit(save(tmp_path), hidden_size="many"))


@pytest.mark.parametrize("asked", [1, 77, 128])
def test_a_length_within_the_models_is_taken(tmp_path: Path, asked: int) -> None:
    assert load_decoder_config(save(tmp_path), asked).max_model_len == asked


@pytest.mark.parametrize("asked", [-1, 0, 129])
def test_a_length_beyond_the_models_is_refused(tmp_path: Path, asked: int) -> None:
    message = refusal(save(tmp_path), asked)
    assert re.match(
        rf"max_model_len: {asked} is not served, the limit is 128 \(.*max_position_embeddings\)", message
    )


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
}


def test_longrope_is_served_up_to_where_it_depends_on_the_length(tmp_path: Path) -> None:
    save(tmp_path, rope_parameters=LONGROPE)
    config = load_decoder_config(tmp_path)
    assert config.max_model_len == 32
    assert config.rope.inv_freq[0] == 1.0
    assert config.rope.scaling > 1
    assert "longrope" in refusal(tmp_path, 33)


def test_dynamic_scaling_is_served_up_to_where_it_depends_on_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = load(tmp_path, rope_parameters=rope)
    assert config.max_model_len == 128
    assert config.rope.inv_freq == pytest.approx([1e4 ** (-i / 6) for i in range(6)])
    assert "129 is not served" in refusal(tmp_path, 129)
