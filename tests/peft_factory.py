"""Makes tiny models and PEFT adapters for tests: real Hugging Face folders with random weights."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PAD, BOS, EOS, TURN = "<|pad|>", "<|bos|>", "<|endoftext|>", "<|turn|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|endoftext|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)

INITIALIZER_RANGE = 0.1
"""Standard deviation of base weights: wide enough that the likeliest token is seldom a near tie."""

DELTA_STD = 0.4
"""Standard deviation of an adapter's delta for an input of unit variance: half of a base linear's."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank-4-all": {"rank": 4, "alpha": 8},
    "rank-16-rslora-qv": {"rank": 16, "alpha": 16, "rslora": True, "modules": ("q_proj", "v_proj")},
    "rank-17-patterns": {
        "rank": 17,
        "alpha": 12,
        "modules": ("o_proj", "down_proj", "gate_proj"),
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {"down_proj": 9, "layers.1.self_attn.o_proj": 5},
    },
    "rank-1-one-layer": {"rank": 1, "alpha": 2, "modules": ("k_proj", "up_proj"), "layers_to_transform": [1]},
    "rank-15-dora": {
        "rank": 15,
        "alpha": 10,
        "use_dora": True,
        "rank_pattern": {"v_proj": 2},
        "exclude_modules": ["gate_proj"],
    },
}
"""Adapters that differ in rank, modules, scale, patterns, kind: by name what make_adapter is told of each."""

COMPOSITIONS: tuple[Mapping[str, float], ...] = (
    {"rank-4-all": 0.7, "rank-16-rslora-qv": 0.3},
    {"rank-4-all": 1.0, "rank-16-rslora-qv": 1.0},
    {"rank-4-all": -1.0, "rank-17-patterns": 1.5},
    {"rank-17-patterns": 0.5, "rank-16-rslora-qv": -2.0},
    {"rank-4-all": 0.5, "rank-1-one-layer": 2.5},
    {"rank-4-all": 0.5, "rank-16-rslora-qv": -0.5, "rank-17-patterns": 1.25, "rank-1-one-layer": 3.0},
)
"""Sums of some of them that PEFT can make too (see e2e_reference): of matrices that all of them adapt, and of
such that one alone adapts."""


def make_tiny_model(tmp_path: Path, family: str, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Writes a random model of two layers, byte-level tokenizer and chat template, to tmp_path / family.

    family: "llama", "mistral", "qwen2" or "qwen3".
    config_overrides: further keywords of the family's configuration class, such as num_hidden_layers=3.
    Answers the folder.
    """
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "mistral":
        sizes["sliding_window"] = None
    config = FAMILIES[family](**{**sizes, **config_overrides})
    folder = tmp_path / family
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
        _randomize_vectors(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 0 to 255), then pad, bos, eos and turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, BOS, EOS, TURN])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_adapter(
    model_folder: Path,
    out: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    modules: Sequence[str] | str = ALL_LINEARS,
    rslora: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **peft_kwargs: Any,
) -> Path:
    """Has PEFT save an adapter with random weights, strong enough to change greedy output, to `out`.

    dtype: of the file. peft_kwargs: further keywords of peft.LoraConfig, such as rank_pattern.
    Answers `out`.
    """
    model = make_peft_model(
        model_folder,
        rank=rank,
        alpha=alpha,
        modules=modules,
        rslora=rslora,
        seed=seed,
        dtype=dtype,
        **peft_kwargs,
    )
    model.save_pretrained(str(out))
    return out


def make_peft_model(
    model_folder: Path,
    *,
    rank: int,
    alpha: float,
    modules: Sequence[str] | str,
    rslora: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    **peft_kwargs: Any,
) -> PeftModel:
    """The model behind make_adapter, not saved."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT says int and takes any number
        use_rslora=rslora,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
        **peft_kwargs,
    )
    model: PeftModel = get_peft_model(base, config)
    _randomize_adapter(model, seed, dtype)
    return model.eval()


def adapted_linears(model: PeftModel) -> dict[str, Any]:
    """PEFT's LoRA linears by their name in the base model, such as "model.layers.0.self_attn.q_proj"."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and "default" in module.lora_A
    }


def _randomize_adapter(model: PeftModel, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    for linear in adapted_linears(model).values():
        a, b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
        rank, in_features = a.shape
        b_std = DELTA_STD / (math.sqrt(rank) * linear.scaling["default"])
        a.data = (torch.randn(a.shape, generator=generator) / math.sqrt(in_features)).to(dtype)
        b.data = (torch.randn(b.shape, generator=generator) * b_std).to(dtype)
        if "default" in linear.lora_magnitude_vector:
            magnitude = linear.lora_magnitude_vector["default"].weight
            factor = 0.7 + 0.6 * torch.rand(magnitude.shape, generator=generator)
            magnitude.data = (magnitude.data * factor).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * DELTA_STD
            parameter.data = (parameter.data + noise).to(dtype)
    _randomize_outside(model, generator, dtype)


def _randomize_outside(model: PeftModel, generator: torch.Generator, dtype: torch.dtype) -> None:
    """LoRA on the embedding, and modules that are trained whole: changes by half of what is there."""

    def noise(shape: torch.Size, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    for module in model.modules():
        if isinstance(module, LoraEmbedding):
            a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
            std = 0.5 * INITIALIZER_RANGE / (math.sqrt(len(a)) * module.scaling["default"])
            a.data, b.data = noise(a.shape, 1.0).to(dtype), noise(b.shape, std).to(dtype)
        if isinstance(module, ModulesToSaveWrapper):
            weight = module.modules_to_save["default"].get_parameter("weight")
            std = 0.5 * INITIALIZER_RANGE if weight.dim() == 2 else 0.5
            weight.data = (weight.data + noise(weight.shape, std)).to(dtype)
    if getattr(model.peft_config["default"], "target_modules_to_tie", None):
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        head.lora_A["default"].weight.data = table.lora_embedding_B["default"].data.T
        head.lora_B["default"].weight.data = table.lora_embedding_A["default"].data.T


def _randomize_vectors(model: PreTrainedModel) -> None:
    """Gives biases and norms random values in place of zeros and ones, so that each of them matters."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            middle = 0.0 if name.endswith("bias") else 1.0
            parameter.data.normal_(middle, INITIALIZER_RANGE)
