"""The bounds on an adapter's files let in the largest adapters that are served, and not much more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_files import (
    BIASED,
    HIDDEN,
    NORMS,
    VOCAB,
    FewWeights,
    make_affine_tensors,
    make_config,
    make_embedding_tensors,
    make_head_tensors,
    make_loader,
    make_norm_tensors,
    make_tensors,
    with_outside,
    write_adapter,
)
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_server.adapters import file_bounds
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from fake_backend import FACTS

RANK = 16
LAYOUT = with_outside(BIASED)
BASE = FewWeights(LAYOUT)
MODEL = replace(FACTS, vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=LAYOUT.num_layers)
TARGETS = make_config()["target_modules"]
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"


Files = tuple[dict[str, Tensor], dict[str, Any]]


def largest_plain() -> Files:
    tensors = make_tensors(LAYOUT, RANK) | make_head_tensors(RANK) | make_embedding_tensors(RANK)
    tensors |= make_norm_tensors(*NORMS)
    tensors[f"{HEAD}.base_layer.weight"] = BASE.tables["lm_head"]
    tensors[f"{EMBEDDING}.base_layer.weight"] = BASE.tables["embed_tokens"]
    config = make_config(
        r=RANK, target_modules=[*TARGETS, "lm_head", "embed_tokens"], modules_to_save=["norm"]
    )
    return tensors, config


def largest_dora() -> Files:
    tensors = make_affine_tensors(LAYOUT, RANK) | make_norm_tensors(*NORMS)
    tensors[f"{EMBEDDING}.weight"] = BASE.tables["embed_tokens"] + 1
    tensors[f"{HEAD}.weight"] = BASE.tables["lm_head"]
    config = make_config(r=RANK, use_dora=True, bias="lora_only", modules_to_save=["norm", "embed_tokens"])
    return tensors, config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [largest_plain, largest_dora])
def test_the_largest_adapters_are_within_the_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Files], dtype: torch.dtype
) -> None:
    tensors, config = make()
    folder = write_adapter(tmp_path / "a", tensors=tensors, config=config)
    make_loader(LAYOUT, max_lora_rank=RANK, dtype=dtype, base=BASE).inspect(folder)
    monkeypatch.setattr(file_bounds, "MAX_HEADER_BYTES", 0)
    bounds = file_bounds.file_bounds(MODEL, RANK, RankPageLayout(LAYOUT).page_bytes(dtype))
    body = sum(tensor.nbytes for tensor in tensors.values())
    assert body <= bounds.max_weights_bytes < 4 * body
    assert (folder / CONFIG_FILE).stat().st_size <= bounds.max_config_bytes
    monkeypatch.undo()
    bounds = file_bounds.file_bounds(MODEL, RANK, RankPageLayout(LAYOUT).page_bytes(dtype))
    assert (folder / WEIGHTS_FILE).stat().st_size <= bounds.max_weights_bytes
