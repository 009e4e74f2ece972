"""What a decoder looks like, read from a Hugging Face folder. Refuses what would not be served exactly."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.layout import AdapterLayout, LinearSlice, OutsideLayers, PackedLinear
from deltaplane_server.models.rope import Rope, build_rope, longest_exact_length

SERVED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures that are served, and their model_type."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family.

    max_model_len: tokens of prompt and output together.
    windows: the sliding window of each layer, in tokens; None is full attention.
    qk_norm: whether queries and keys are normalized per head before the rotation.
    eos_token_ids: tokens that end an output.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    def adapter_layout(self) -> AdapterLayout:
        """The linears of a layer, packed as the decoder computes them, and what is outside them."""
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return AdapterLayout(
            num_layers=self.num_layers,
            linears=(
                _packed("qkv_proj", hidden, self.qkv_bias, q_proj=q_size, k_proj=kv_size, v_proj=kv_size),
                _packed("o_proj", q_size, self.o_bias, o_proj=hidden),
                _packed("gate_up_proj", hidden, self.mlp_bias, gate_proj=inner, up_proj=inner),
                _packed("down_proj", inner, self.mlp_bias, down_proj=hidden),
            ),
            outside=OutsideLayers(
                self.vocab_size, hidden, self.norm_sizes(), is_tied=self.tie_word_embeddings
            ),
        )

    def norm_sizes(self) -> dict[str, int]:
        """The size of each norm, by its path in the model."""
        in_layer = {"input_layernorm": self.hidden_size, "post_attention_layernorm": self.hidden_size}
        if self.qk_norm:
            in_layer |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        sizes = {
            f"layers.{layer}.{norm}": size
            for layer in range(self.num_layers)
            for norm, size in in_layer.items()
        }
        return sizes | {"norm": self.hidden_size}

    def has_bias(self, linear: str) -> bool:
        """Whether the packed linear of this name has a bias."""
        return {"qkv_proj": self.qkv_bias, "o_proj": self.o_bias}.get(linear, self.mlp_bias)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint, but for lm_head.weight where the embeddings are tied."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        shapes |= {f"model.{norm}.weight": (size,) for norm, size in self.norm_sizes().items()}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = table
        linears = self.adapter_layout().linears
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            for linear in linears:
                for part in linear.slices:
                    shapes[f"{prefix}.{part.module}.weight"] = (part.out_features, linear.in_features)
                    if self.has_bias(linear.name):
                        shapes[f"{prefix}.{part.module}.bias"] = (part.out_features,)
        return shapes


def load_decoder_config(folder: Path, max_model_len: int | None = None) -> DecoderConfig:
    """Reads config.json and generation_config.json.

    max_model_len: None takes the longest that the model serves exactly.
    Errors: InvalidArgumentError, which names the architecture or the feature and says what is served.
    """
    raw = _read_json(folder / "config.json")
    architecture = _served_architecture(raw)
    try:
        hf = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers and huggingface_hub check it, each with errors of its own
        reason = " ".join(str(error).split())
        raise InvalidArgumentError(
            f"{folder / 'config.json'} is not a config of {architecture}: {reason}"
        ) from error
    refused = _refused_features(hf)
    if refused:
        raise InvalidArgumentError(
            f"{architecture} with {', '.join(refused)} would not be served exactly; served are "
            f"{', '.join(SERVED)}, unquantized, with hidden_act 'silu' and full or sliding attention"
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    length = _max_model_len(hf, max_model_len)
    is_qwen2 = hf.model_type == "qwen2"
    attention_bias = bool(getattr(hf, "attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        max_model_len=length,
        rope=build_rope(hf, head_dim),
        windows=_windows(hf),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=hf.model_type == "qwen3",
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(folder, hf),
    )


def _packed(name: str, in_features: int, has_bias: bool, **slices: int) -> PackedLinear:
    block = "self_attn" if name in ("qkv_proj", "o_proj") else "mlp"
    parts = tuple(LinearSlice(f"{block}.{module}", size) for module, size in slices.items())
    return PackedLinear(name, in_features, parts, has_bias)


def _served_architecture(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    architecture = architectures[0] if architectures else "a model that names no architecture"
    if SERVED.get(architecture) != raw.get("model_type"):
        model_type = raw.get("model_type")
        raise InvalidArgumentError(
            f"{architecture} (model_type {model_type!r}) is not served; served are {', '.join(SERVED)}"
        )
    return str(architecture)


def _refused_features(hf: PretrainedConfig) -> list[str]:
    """What the config asks for and the decoder does not do."""
    window = getattr(hf, "sliding_window", None)
    layer_types = set(getattr(hf, "layer_types", None) or ())
    refused = {
        f"a config that transformers takes for {hf.model_type!r}": hf.model_type not in SERVED.values(),
        "a quantization_config": getattr(hf, "quantization_config", None) is not None,
        f"hidden_act {hf.hidden_act!r}": hf.hidden_act != "silu",
        "pretraining_tp above 1": (getattr(hf, "pretraining_tp", None) or 1) > 1,
        "is_causal false": getattr(hf, "is_causal", True) is False,
        f"layer_types {sorted(layer_types)}": not layer_types <= {"full_attention", "sliding_attention"},
        f"sliding_window {window}": window is not None and window < 1,
        f"{hf.num_attention_heads} attention heads over {hf.num_key_value_heads} KV heads": (
            hf.num_attention_heads % hf.num_key_value_heads != 0
        ),
    }
    return [feature for feature, is_asked in refused.items() if is_asked]


def _windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    if hf.model_type == "llama":
        return (None,) * int(hf.num_hidden_layers)
    window: int | None = hf.sliding_window
    if hf.model_type == "mistral":
        return (window,) * int(hf.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _max_model_len(hf: PretrainedConfig, asked: int | None) -> int:
    longest, reason = longest_exact_length(hf)
    if asked is None:
        return longest
    if not 1 <= asked <= longest:
        raise InvalidArgumentError.for_field(
            "max_model_len",
            f"{asked} is not served, the limit is {longest} ({reason}); ask for 1 to {longest}",
        )
    return asked


def _eos_token_ids(folder: Path, hf: PretrainedConfig) -> frozenset[int]:
    """generation_config.json has the last word, as in transformers."""
    path = folder / "generation_config.json"
    ids = _read_json(path).get("eos_token_id") if path.is_file() else None
    if ids is None:
        ids = hf.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(i for i in ([ids] if isinstance(ids, int) else ids) if 0 <= i < hf.vocab_size)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} is not a JSON object")
    return content
