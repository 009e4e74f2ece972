"""Packed adapters against PEFT itself: the delta of every linear, over the space of LoRA configurations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import peft_factory
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.rank_pages import RankPageLayout, SliceRows
from deltaplane_server.adapters.packing import PackedAdapter
from deltaplane_server.adapters.peft_loader import PeftLoader
from lora_cases import make_layout

LAYOUT = make_layout(num_layers=3, hidden=64, kv=32, intermediate=128)
PAGES = RankPageLayout(LAYOUT)
KINDS = peft_factory.ALL_LINEARS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_factory.make_tiny_model(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=3)


def deltas_of_peft(base: Path, adapter: Path) -> dict[str, Tensor]:
    """B A times the scale, [out, in], of each linear that PEFT adapts, as it loads the folder."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    )
    return {
        name: linear.get_delta_weight("default").detach()
        for name, linear in peft_factory.adapted_linears(model).items()
    }


def deltas_of_pages(packed: PackedAdapter) -> dict[str, Tensor]:
    """The same out of rank pages. Linears of rank 0 must be zeros there, and are left out."""
    deltas = {}
    for layer, rows in enumerate(packed.rows):
        for linear in LAYOUT.linears:
            first = PAGES.placements[linear.name].first_slice
            for index, part in enumerate(linear.slices):
                a = PAGES.a(packed.pages, layer, linear.name)[:, index].flatten(0, 1)
                b = PAGES.b(packed.pages, layer, linear.name, index).flatten(0, 1)
                rank = rows[first + index].rank
                assert not a[rank:].any()
                assert not b[rank:].any()
                if rank:
                    deltas[f"model.layers.{layer}.{part.module}"] = b.float().T @ a.float()
    return deltas


def check_fidelity(base: Path, adapter: Path) -> PackedAdapter:
    loader = PeftLoader(LAYOUT, max_lora_rank=256, dtype=torch.float32)
    manifest = loader.inspect(adapter)
    packed = loader.pack(manifest)
    ours, expected = deltas_of_pages(packed), deltas_of_peft(base, adapter)
    assert ours.keys() == expected.keys()
    for name, delta in expected.items():
        torch.testing.assert_close(ours[name], delta, rtol=1e-5, atol=1e-6 * float(delta.abs().max()))
    assert manifest.rank == max(one.rank for layer in packed.rows for one in layer)
    assert packed.nbytes == manifest.host_bytes
    return packed


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 12, 16, 17, 32, 64, 100, 128, 256])
def test_ranks(base: Path, tmp_path: Path, rank: int) -> None:
    adapter = peft_factory.make_adapter(base, tmp_path / "a", rank=rank, alpha=16, seed=rank)
    assert check_fidelity(base, adapter).rows == [[SliceRows(rank)] * 7] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"rslora": True},
        {"alpha": 7.5, "rslora": True},
        {"alpha": -3},
        {"rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 17}},
        {"alpha_pattern": {"k_proj": 1, r"layers\.[02]\.mlp\..*": 40}},
        {"rank_pattern": {"^model.layers.2.*": 2}, "alpha_pattern": {"^model.layers.2.*": 5}, "rslora": True},
        {"rank_pattern": {".*_proj": 5, "q_proj": 4}},
        {"modules": r".*\.layers\.\d+\.self_attn\.(q|v)_proj"},
        {"modules": r".*\.layers\.1\..*_proj"},
        {"modules": "all-linear"},
        {"modules": "all-linear", "exclude_modules": ["k_proj", "mlp.up_proj"]},
        {"modules": ["q_proj", "v_proj"]},
        {"modules": ["down_proj"]},
        {"modules": ["model.layers.0.self_attn.o_proj", "layers.2.mlp.up_proj"]},
        {"layers_to_transform": [0, 2]},
        {"layers_to_transform": 1},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"exclude_modules": r".*layers\.0\..*"},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.3},
        {"init_lora_weights": "orthogonal"},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_configurations(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    check_fidelity(base, peft_factory.make_adapter(base, tmp_path / "a", seed=1, **options))


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")
def test_what_peft_saves_and_is_not_served_is_refused_by_name(
    base: Path, tmp_path: Path, options: dict[str, Any], feature: str
) -> None:
    adapter = peft_factory.make_adapter(base, tmp_path / "a", rank=4, **options)
    with pytest.raises(InvalidArgumentError, match=feature):
        PeftLoader(LAYOUT, max_lora_rank=256, dtype=torch.float32).inspect(adapter)


PATTERNS = ["q_proj", "k_proj", "mlp.down_proj", "layers.1.self_attn.q_proj", r"layers\.[01]\..*", "^model.*"]


def sorted_dictionaries(values: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, int]]:
    """PEFT saves patterns in the order of their keys, and the first that matches counts."""
    return st.dictionaries(st.sampled_from(PATTERNS), values, max_size=3).map(
        lambda table: dict(sorted(table.items()))
    )


@settings(
    deadline=None,
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    rank=st.integers(1, 20),
    alpha=st.integers(-40, 40).filter(bool) | st.floats(0.25, 64),
    rslora=st.booleans(),
    modules=st.sets(st.sampled_from(KINDS)).map(
        lambda kinds: sorted(kinds | {"q_proj", "k_proj", "down_proj"})
    ),
    rank_pattern=sorted_dictionaries(st.integers(1, 20)),
    alpha_pattern=sorted_dictionaries(st.integers(1, 64)),
    layers=st.none() | st.sets(st.integers(0, 2), min_size=1).map(lambda layers: sorted(layers | {1})),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_configuration(
    base: Path,
    tmp_path_factory: pytest.TempPathFactory,
    rank: int,
    alpha: float,
    rslora: bool,
    modules: list[str],
    rank_pattern: dict[str, int],
    alpha_pattern: dict[str, float],
    layers: list[int] | None,
    dtype: torch.dtype,
) -> None:
    adapter = peft_factory.make_adapter(
        base,
        tmp_path_factory.mktemp("any") / "a",
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        modules=modules,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        layers_to_transform=layers,
        dtype=dtype,
    )
    check_fidelity(base, adapter)
