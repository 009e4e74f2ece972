"""Writes adapter folders by hand: the files that PEFT would save, and such as it would not."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, OutsideLayers
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.peft_loader import PeftLoader
from lora_cases import make_layout

LAYOUT = make_layout(num_layers=2, hidden=16, kv=8, intermediate=24)
RANK, ALPHA = 4, 6


def make_loader(
    layout: AdapterLayout = LAYOUT,
    *,
    max_lora_rank: int = 16,
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> PeftLoader:
    return PeftLoader(layout, max_lora_rank=max_lora_rank, dtype=dtype, **others)


def with_biases(layout: AdapterLayout, *names: str) -> AdapterLayout:
    """The layout of a base that has biases in these packed linears."""
    linears = (replace(linear, has_bias=linear.name in names) for linear in layout.linears)
    return replace(layout, linears=tuple(linears))


BIASED = with_biases(LAYOUT, "qkv_proj", "down_proj")


VOCAB, HIDDEN = 30, 16
NORMS = {
    f"layers.{layer}.{norm}": 8 if "self_attn" in norm else HIDDEN
    for layer in range(2)
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
} | {"norm": HIDDEN}


def with_outside(layout: AdapterLayout, *, is_tied: bool = False) -> AdapterLayout:
    """The layout of a base that has a vocabulary and norms around these linears, of the sizes of LAYOUT."""
    return replace(layout, outside=OutsideLayers(VOCAB, HIDDEN, NORMS, is_tied))


class FewWeights:
    """Random weights of a layout (adapters.affine.BaseWeights), by the plainest of means."""

    def __init__(self, layout: AdapterLayout = BIASED) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tables: dict[str, Tensor] = {}
        if layout.outside is not None:
            shape = (layout.outside.vocab_size, layout.outside.hidden_size)
            for module in ("embed_tokens", "lm_head"):
                self.tables[module] = torch.randn(shape, generator=generator)
        self.weights: dict[tuple[int, str, int], Tensor] = {}
        self.biases: dict[tuple[int, str, int], Tensor] = {}
        for layer in range(layout.num_layers):
            for linear in layout.linears:
                for index, part in enumerate(linear.slices):
                    shape = (part.out_features, linear.in_features)
                    place = (layer, linear.name, index)
                    self.weights[place] = torch.randn(shape, generator=generator)
                    bias = torch.randn(part.out_features, generator=generator)
                    self.biases[place] = bias if linear.has_bias else torch.zeros_like(bias)

    def bias(self, layer: int, linear: str, index: int) -> Tensor:
        return self.biases[layer, linear, index]

    def row_norms(self, layer: int, linear: str, index: int, a: Tensor, b: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.weights[layer, linear, index] + b @ a, dim=1)
        return norms

    def equals_table(self, module: str, pieces: Iterable[Tensor]) -> bool:
        return torch.equal(torch.cat(list(pieces)).float(), self.tables[module])


def make_config(**changes: Any) -> dict[str, Any]:
    """A configuration that targets all seven linears of all layers."""
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        **changes,
    }


def make_tensors(
    layout: AdapterLayout = LAYOUT, rank: int = RANK, prefix: str = "base_model.model.model."
) -> dict[str, Tensor]:
    """Random A and B of all linears, by PEFT's names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layout.num_layers):
        for linear in layout.linears:
            for part in linear.slices:
                name = f"{prefix}layers.{layer}.{part.module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, linear.in_features, generator=generator)
                tensors[f"{name}.lora_B.weight"] = torch.randn(part.out_features, rank, generator=generator)
    return tensors


def make_affine_tensors(
    layout: AdapterLayout = BIASED, rank: int = RANK, prefix: str = "base_model.model.model."
) -> dict[str, Tensor]:
    """The same with DoRA, and with all biases of the layout, which are trained: with LoRA on all linears."""
    generator = torch.Generator().manual_seed(2)
    tensors = make_tensors(layout, rank, prefix)
    for layer in range(layout.num_layers):
        for linear in layout.linears:
            for part in linear.slices:
                name = f"{prefix}layers.{layer}.{part.module}"
                tensors[f"{name}.lora_magnitude_vector"] = (
                    torch.rand(part.out_features, generator=generator) + 3
                )
                if linear.has_bias:
                    tensors[f"{name}.base_layer.bias"] = torch.randn(part.out_features, generator=generator)
    return tensors


def make_head_tensors(rank: int = RANK) -> dict[str, Tensor]:
    """LoRA on the head of with_outside()."""
    generator = torch.Generator().manual_seed(3)
    name = "base_model.model.lm_head"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, HIDDEN, generator=generator),
        f"{name}.lora_B.weight": torch.randn(VOCAB, rank, generator=generator),
    }


def make_embedding_tensors(rank: int = RANK) -> dict[str, Tensor]:
    """LoRA on the embedding of with_outside()."""
    generator = torch.Generator().manual_seed(4)
    name = "base_model.model.model.embed_tokens"
    return {
        f"{name}.lora_embedding_A": torch.randn(rank, VOCAB, generator=generator),
        f"{name}.lora_embedding_B": torch.randn(HIDDEN, rank, generator=generator),
    }


def make_norm_tensors(*paths: str) -> dict[str, Tensor]:
    """Trained norms of with_outside()."""
    generator = torch.Generator().manual_seed(5)
    return {
        f"base_model.model.model.{path}.weight": torch.randn(NORMS[path], generator=generator)
        for path in paths
    }


def write_adapter(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes both files; a whole adapter of LAYOUT by default. Answers the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: tensor.contiguous() for key, tensor in (tensors or make_tensors()).items()}
    (folder / WEIGHTS_FILE).write_bytes(save(content, metadata={"format": "pt"}))
    (folder / CONFIG_FILE).write_text(json.dumps(make_config() if config is None else config))
    return folder
