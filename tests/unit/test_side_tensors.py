"""What is read of an adapter outside the linears of the layers: what is served, what is refused and why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import ModulesToSaveWrapper
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapter_files import (
    HIDDEN,
    LAYOUT,
    NORMS,
    RANK,
    VOCAB,
    FewWeights,
    make_config,
    make_embedding_tensors,
    make_head_tensors,
    make_loader,
    make_norm_tensors,
    make_tensors,
    with_outside,
    write_adapter,
)
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.layout import AdapterLayout, OutsideLayers
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_kernels.side_pages import RowBlock, SideShape, side_page_layout
from deltaplane_server.adapters.peft_config import parse_config
from deltaplane_server.adapters.side_names import with_root
from deltaplane_server.adapters.side_tensors import find_side
from deltaplane_server.adapters.tensor_names import NamedTensors
from deltaplane_server.adapters.trained_modules import trained_modules
from deltaplane_server.models.config import load_decoder_config
from peft_factory import make_tiny_model

OUTSIDE, TIED = with_outside(LAYOUT), with_outside(LAYOUT, is_tied=True)
BASE = FewWeights(OUTSIDE)
ROOT = "base_model.model.model."
HEAD, EMBEDDING = "base_model.model.lm_head", f"{ROOT}embed_tokens"
TARGETS = make_config()["target_modules"]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def copies() -> dict[str, Tensor]:
    return {
        f"{HEAD}.base_layer.weight": BASE.tables["lm_head"],
        f"{EMBEDDING}.base_layer.weight": BASE.tables["embed_tokens"],
    }


def write(folder: Path, extra: dict[str, Tensor], *targets: str, **config: Any) -> Path:
    """All linears have LoRA, and so have `targets`."""
    whole = make_config(**{"target_modules": [*TARGETS, *targets], **config})
    return write_adapter(folder / "a", tensors=make_tensors() | extra, config=whole)


def refusal(folder: Path, layout: AdapterLayout = OUTSIDE, **loader: Any) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        make_loader(layout, **{"base": BASE, **loader}).inspect(folder)
    assert len(caught.value.message) < 2000
    return caught.value.message


def rows_of(block: RowBlock | None, pages: Tensor) -> Tensor:
    assert block is not None
    return torch.cat(list(block.runs(pages, range(len(pages)))))


# What is served


def test_parts_lie_in_side_pages_with_the_scale_in_b(tmp_path: Path) -> None:
    norms = ("layers.0.self_attn.k_norm", "layers.1.self_attn.k_norm", "norm")
    extra = make_head_tensors() | make_embedding_tensors() | copies() | make_norm_tensors(*norms)
    folder = write(
        tmp_path,
        extra,
        "lm_head",
        "embed_tokens",
        modules_to_save=["k_norm", "model.norm"],
        alpha_pattern={"lm_head": 10},
    )
    loader = make_loader(OUTSIDE, base=BASE)
    manifest = loader.inspect(folder)
    packed = loader.pack(manifest)
    assert packed.side == SideShape(head_rank=RANK, embedding_rank=RANK, norms=norms)
    layout = side_page_layout(OUTSIDE)
    assert layout is not None
    place = layout.place(packed.side)
    assert len(packed.pages) == manifest.num_pages == 1 + place.num_pages
    pages = packed.pages[1:]
    assert torch.equal(rows_of(place.head_a, pages), extra[f"{HEAD}.lora_A.weight"])
    assert torch.equal(rows_of(place.head_b, pages), extra[f"{HEAD}.lora_B.weight"].T * 2.5)
    assert torch.equal(rows_of(place.embedding_a, pages), extra[f"{EMBEDDING}.lora_embedding_A"])
    assert torch.equal(rows_of(place.embedding_b, pages), extra[f"{EMBEDDING}.lora_embedding_B"].T * 1.5)
    [row] = rows_of(place.norm_row, pages)
    for norm in norms:
        at = place.norms[norm]
        assert torch.equal(row[at : at + NORMS[norm]], extra[f"{ROOT}{norm}.weight"])


def test_a_trained_table_lies_in_side_pages(tmp_path: Path) -> None:
    table = random(VOCAB, HIDDEN).bfloat16()
    folder = write(tmp_path, {f"{EMBEDDING}.weight": table}, modules_to_save=["embed_tokens"])
    loader = make_loader(OUTSIDE)
    packed = loader.pack(loader.inspect(folder))
    assert packed.side == SideShape(has_table=True)
    layout = side_page_layout(OUTSIDE)
    assert layout is not None
    assert torch.equal(rows_of(layout.place(packed.side).table, packed.pages[1:]), table.float())


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    extra = {f"{HEAD}.lora_A.weight": random(9, HIDDEN), f"{HEAD}.lora_B.weight": random(VOCAB, 9)}
    extra |= {f"{EMBEDDING}.weight": random(VOCAB, HIDDEN)} | make_norm_tensors("norm")
    folder = write(
        tmp_path,
        extra,
        "lm_head",
        modules_to_save=["model.norm", "embed_tokens"],
        rank_pattern={"lm_head": 9},
    )
    manifest = make_loader(OUTSIDE).inspect(folder)
    assert manifest.features == ("lm_head", "trained_embeddings", "trained_norms")
    assert manifest.target_modules[-1] == "lm_head"
    assert manifest.rank == 9
    assert manifest.rank_pattern == dict.fromkeys(TARGETS, RANK)
    page_bytes = RankPageLayout(OUTSIDE).page_bytes(torch.float32)
    assert manifest.host_bytes == manifest.num_pages * page_bytes


@pytest.mark.parametrize("root", ["model.", "model.language_model.", "language_model.model.", ""])
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_an_adapter_of_the_vocabulary_alone(tmp_path: Path, root: str, prefix: str) -> None:
    """By the names of any base, and with the adapter's own name in them."""
    head_name = "language_model.lm_head" if root == "language_model.model." else "lm_head"
    tensors = {
        f"{prefix}{head_name}.lora_A.default.weight": random(RANK, HIDDEN),
        f"{prefix}{head_name}.lora_B.default.weight": random(VOCAB, RANK),
        f"{prefix}{root}embed_tokens.lora_embedding_A.default": random(RANK, VOCAB),
        f"{prefix}{root}embed_tokens.lora_embedding_B": random(HIDDEN, RANK),
    }
    config = make_config(target_modules=f"{root}embed_tokens|{head_name}")
    loader = make_loader(OUTSIDE)
    manifest = loader.inspect(write_adapter(tmp_path / "a", tensors=tensors, config=config))
    assert manifest.features == ("embed_tokens", "lm_head")
    assert (manifest.rank, manifest.num_layers) == (RANK, 0)
    packed = loader.pack(manifest)
    assert packed.side == SideShape(head_rank=RANK, embedding_rank=RANK)
    assert len(packed.pages) == manifest.num_pages == 1


def test_trained_norms_count_as_changed_layers(tmp_path: Path) -> None:
    tensors = make_head_tensors() | make_norm_tensors("layers.1.input_layernorm", "norm")
    config = make_config(target_modules=["lm_head"], modules_to_save=["1.input_layernorm", "model.norm"])
    folder = write_adapter(tmp_path / "a", tensors=tensors, config=config)
    assert make_loader(OUTSIDE).inspect(folder).num_layers == 1


def test_a_base_copy_may_have_another_dtype_and_name(tmp_path: Path) -> None:
    tables = {name: table.bfloat16().float() for name, table in BASE.tables.items()}
    base = FewWeights(OUTSIDE)
    base.tables = tables
    extra = {
        f"{HEAD}.weight": tables["lm_head"].bfloat16(),
        f"{EMBEDDING}.weight": tables["embed_tokens"].bfloat16(),
    }
    loader = make_loader(OUTSIDE, base=base)
    manifest = loader.inspect(write(tmp_path, extra))
    assert manifest.features == ()
    assert not loader.pack(manifest).side


def test_ensure_weight_tying_is_nothing_on_a_base_that_ties_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, make_head_tensors(), "lm_head", ensure_weight_tying=True)
    assert make_loader(OUTSIDE).inspect(folder).features == ("lm_head",)


def test_ensure_weight_tying_of_what_is_not_tied_is_nothing(tmp_path: Path) -> None:
    folder = write(
        tmp_path, make_norm_tensors("norm"), modules_to_save=["model.norm"], ensure_weight_tying=True
    )
    assert make_loader(TIED).inspect(folder).features == ("trained_norms",)


# What is refused


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("lm_head", "a whole head of its own is not served"),
        ("head", "a whole head of its own is not served"),
        ("q_proj", "layers.0.self_attn.q_proj"),
        ("mlp", "more in modules_to_save than norms and embed_tokens"),
        ("layers.0", "more in modules_to_save than norms and embed_tokens"),
        ("s", "more in modules_to_save than norms and embed_tokens"),
        ("", "more in modules_to_save than norms and embed_tokens|a whole head"),
        ("score", "no module of this base"),
        ("layers.2.input_layernorm", "no module of this base"),
        (".*norm", "no module of this base"),
    ],
)
def test_other_trained_modules_are_refused(tmp_path: Path, module: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        make_loader(OUTSIDE).inspect(write(tmp_path, {}, modules_to_save=[module]))


def test_ensure_weight_tying_of_a_trained_table_is_refused(tmp_path: Path) -> None:
    extra = {f"{EMBEDDING}.weight": random(VOCAB, HIDDEN)}
    folder = write(tmp_path, extra, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    assert "so that the head is trained too" in refusal(folder, TIED)
    assert make_loader(OUTSIDE).inspect(folder).features == ("trained_embeddings",)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_tied_lora_that_differs_is_refused(tmp_path: Path, part: str) -> None:
    extra = make_embedding_tensors()
    extra[f"{HEAD}.lora_A.weight"] = extra[f"{EMBEDDING}.lora_embedding_B"].T.clone()
    extra[f"{HEAD}.lora_B.weight"] = extra[f"{EMBEDDING}.lora_embedding_A"].T.clone()
    folder = write(tmp_path, extra, "model.embed_tokens", ensure_weight_tying=True)
    assert make_loader(TIED).inspect(folder).features == ("embed_tokens", "lm_head")
    extra[f"{HEAD}.{part}.weight"][-1, -1] += 1
    message = refusal(write(tmp_path, extra, "model.embed_tokens", ensure_weight_tying=True), TIED)
    assert f"{HEAD}.{part}.weight' is not '{EMBEDDING}" in message


def test_tied_lora_that_is_there_once_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, make_embedding_tensors(), "embed_tokens", ensure_weight_tying=True)
    assert "has no lora_A and no lora_B of it" in refusal(folder, TIED)


@pytest.mark.parametrize(("option", "feature"), [("use_dora", "DoRA"), ("lora_bias", "lora_bias")])
def test_variants_of_lora_on_the_vocabulary_are_refused(tmp_path: Path, option: str, feature: str) -> None:
    tensors = make_head_tensors() | {
        f"{HEAD}.lora_magnitude_vector": random(VOCAB),
        f"{HEAD}.lora_B.bias": random(VOCAB),
    }
    assert f"asks for {feature} on 'lm_head'" in refusal(
        write(tmp_path, tensors, "lm_head", **{option: True})
    )


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_copy_of_another_base_is_refused_when_inspected_and_when_packed(
    tmp_path: Path, module: str
) -> None:
    name = f"{HEAD if module == 'lm_head' else EMBEDDING}.base_layer.weight"
    folder = write(tmp_path, make_head_tensors() | copies(), "lm_head")
    manifest = make_loader(OUTSIDE, base=BASE).inspect(folder)
    other = FewWeights(OUTSIDE)
    other.tables[module] = other.tables[module].clone()
    other.tables[module][-1, -1] += 1
    assert f"'{name}' is not the {module} of this base" in refusal(folder, base=other)
    with pytest.raises(InvalidArgumentError, match=f"is not the {module} of this base"):
        make_loader(OUTSIDE, base=other).pack(manifest)
    assert "not at hand" in refusal(folder, base=None)


@pytest.mark.parametrize(
    ("extra", "targets", "saved", "why"),
    [
        ({}, ["lm_head"], [], "has no lora_A and no lora_B of it"),
        ({}, ["embed_tokens"], [], "has no lora_embedding_A and no lora_embedding_B of it"),
        (dict(list(make_head_tensors().items())[:1]), ["lm_head"], [], "has no lora_B of it"),
        (make_head_tensors(), [], [], "does not ask for"),
        (make_embedding_tensors(), [], [], "does not ask for"),
        (make_norm_tensors("norm"), [], [], "does not ask for"),
        (make_norm_tensors("norm", "layers.0.input_layernorm"), [], ["model.norm"], "does not ask for"),
        (
            {},
            [],
            ["model.norm"],
            "has norm in modules_to_save; adapter_model.safetensors has no weight of it",
        ),
        ({}, [], ["embed_tokens"], "has embed_tokens in modules_to_save"),
        (make_embedding_tensors(), ["embed_tokens"], ["tokens"], "in target_modules and in modules_to_save"),
        ({f"{HEAD}.lora_embedding_A": random(RANK, VOCAB)}, [], [], "other parts of lm_head"),
        ({f"{EMBEDDING}.lora_A.weight": random(RANK, VOCAB)}, [], [], "other parts of embed_tokens"),
        ({f"{ROOT}norm.lora_A.weight": random(RANK, HIDDEN)}, [], [], "belong to no linear"),
        ({f"{ROOT}layers.2.input_layernorm.weight": random(HIDDEN)}, [], [], "belong to no linear"),
        ({f"{ROOT}norm.modules_to_save.weight": random(HIDDEN)}, [], [], "trained whole"),
        (
            make_head_tensors() | {"lm_head.lora_A.weight": random(RANK, HIDDEN)},
            ["lm_head"],
            [],
            "has weights twice",
        ),
        (
            make_head_tensors() | {f"{HEAD}.lora_A.weight": random(RANK, HIDDEN + 1)},
            ["lm_head"],
            [],
            r"takes \(4, 16\)",
        ),
        (
            make_head_tensors() | {f"{HEAD}.lora_B.weight": random(VOCAB + 2, RANK)},
            ["lm_head"],
            [],
            r"takes \(30, 4\)",
        ),
        ({f"{EMBEDDING}.weight": random(VOCAB + 2, HIDDEN)}, [], ["embed_tokens"], r"takes \(30, 16\)"),
        ({f"{EMBEDDING}.base_layer.weight": random(VOCAB - 2, HIDDEN)}, [], [], r"takes \(30, 16\)"),
        ({f"{ROOT}norm.weight": random(HIDDEN, 1)}, [], ["model.norm"], r"takes \(16,\)"),
        ({"base_model.model.norm.weight": random(HIDDEN)}, [], [], "mixes names of bases"),
    ],
)
def test_what_does_not_fit_the_configuration_or_the_base_is_refused(
    tmp_path: Path, extra: dict[str, Tensor], targets: list[str], saved: list[str], why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        make_loader(OUTSIDE, base=BASE).inspect(write(tmp_path, extra, *targets, modules_to_save=saved))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize(
    "part",
    [*make_head_tensors(), *make_embedding_tensors(), f"{ROOT}norm.weight", f"{HEAD}.base_layer.weight"],
)
def test_values_that_are_not_finite_are_refused(tmp_path: Path, part: str, bad: float) -> None:
    extra = make_head_tensors() | make_embedding_tensors() | copies() | make_norm_tensors("norm")
    extra[part] = extra[part].clone()
    extra[part].view(-1)[-1] = bad
    message = refusal(
        write(tmp_path, extra, "lm_head", "embed_tokens", modules_to_save=["model.norm"]), dtype=torch.float16
    )
    assert part in message
    if bad == 1e38 and "base_layer" not in part:
        assert "overflow" in message
    elif "base_layer" not in part:
        assert "NaN or infinite" in message


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_ranks_of_the_vocabulary_are_bounded(tmp_path: Path, module: str) -> None:
    extra = make_head_tensors() if module == "lm_head" else make_embedding_tensors()
    folder = write(tmp_path, extra, module, rank_pattern={module: 17})
    with pytest.raises(InvalidArgumentError, match=r"rank 17 .* is over --max-lora-rank 16") as caught:
        make_loader(OUTSIDE).inspect(folder)
    assert caught.value.reason == "ADAPTER_TOO_LARGE"


def test_a_vocabulary_of_which_a_page_holds_no_row_is_refused(tmp_path: Path) -> None:
    vocab = RankPageLayout(OUTSIDE).page_elements + 1
    wide = replace(LAYOUT, outside=OutsideLayers(vocab, HIDDEN, NORMS))
    extra = {f"{HEAD}.lora_A.weight": random(RANK, HIDDEN), f"{HEAD}.lora_B.weight": random(vocab, RANK)}
    message = refusal(write(tmp_path, extra, "lm_head"), wide)
    assert f"lm_head cannot be served with this base: a row of {vocab} does not fit in a page" in message


def test_an_adapter_that_targets_nothing_is_refused(tmp_path: Path) -> None:
    config = make_config(target_modules="nothing", modules_to_save=["model.norm"])
    folder = write_adapter(tmp_path / "a", tensors=make_norm_tensors("norm"), config=config)
    assert "targets no module of this base" in refusal(folder)


# modules_to_save means what it means to PEFT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize(
    "names",
    [
        ["norm"],
        ["model.norm"],
        ["layernorm"],
        ["k_norm", "q_norm"],
        ["0.input_layernorm", "tokens"],
        ["m"],
        ["model.layers.1.self_attn.q_norm", "embed_tokens"],
    ],
    ids=str,
)
def test_trained_modules_are_those_that_peft_trains(model: Path, names: list[str]) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(target_modules=["v_proj"], modules_to_save=names))
    wrapped = {
        name.removeprefix("base_model.model.model.")
        for name, module in peft.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    }
    layout = load_decoder_config(model).adapter_layout()
    assert layout.outside is not None
    served = {f"model.{path}": path for path in (*layout.outside.norms, "embed_tokens")}
    config = parse_config(b'{"peft_type": "LORA"}')
    found = trained_modules(
        replace(config, modules_to_save=tuple(names)), served, "lm_head", layout, "model."
    )
    assert set(found) == wrapped


def test_names_of_all_modules_are_known(model: Path) -> None:
    """Whatever module of a base PEFT could train is served, or refused as one of this base."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layout = load_decoder_config(model).adapter_layout()
    names = with_root(NamedTensors([], "model.", []))
    config = parse_config(b'{"peft_type": "LORA", "target_modules": "nothing"}')
    for name, _ in base.named_modules():
        with pytest.raises(InvalidArgumentError, match=r"no weight of it|more in|whole head"):
            find_side(names, replace(config, modules_to_save=(name,)), layout, 8)
