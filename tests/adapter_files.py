"""Writes adapter folders by hand: the files that PEFT would save, and such as it would not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout
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
