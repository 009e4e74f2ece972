"""DoRA and biases out of an adapter's files: what is packed, and what is refused by name."""

import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapter_files import (
    ALPHA,
    BIASED,
    LAYOUT,
    RANK,
    FewWeights,
    make_affine_tensors,
    make_config,
    make_loader,
    make_tensors,
    write_adapter,
)
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.rank_pages import RankPageLayout, SliceRows
from deltaplane_server.adapters.host_pages import HostPages
from deltaplane_server.adapters.packing import PackedAdapter

MODULE = "base_model.model.model.layers.0.self_attn."
Q0, O0 = f"{MODULE}q_proj", f"{MODULE}o_proj"
AFFINE: dict[str, Any] = {"use_dora": True, "bias": "lora_only"}


def pack(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], base: FewWeights, **loader: Any
) -> PackedAdapter:
    write_adapter(folder, tensors=tensors, config=config)
    made = make_loader(BIASED, base=base, **loader)
    return made.pack(made.inspect(folder))


def outputs(packed: PackedAdapter, base: FewWeights, x: Tensor) -> dict[str, Tensor]:
    """The output of each linear for x [n, in], by the pages' own definition: y + g * y + d + (x A^T) B."""
    layout = RankPageLayout(BIASED)
    found = {}
    for layer, linear in product(range(BIASED.num_layers), BIASED.linears):
        for index, part in enumerate(linear.slices):
            rows = packed.rows[layer][layout.placements[linear.name].first_slice + index]
            a = layout.a(packed.pages, layer, linear.name)[:, index].flatten(0, 1).float()
            b = layout.b(packed.pages, layer, linear.name, index).flatten(0, 1).float()
            place, own_x = (layer, linear.name, index), x[:, : linear.in_features]
            y = own_x @ base.weights[place].T + base.biases[place]
            gain = b[rows.rank] if rows.has_gain else torch.zeros(part.out_features)
            bias = b[rows.num_rows - 1] if rows.has_bias else torch.zeros(part.out_features)
            assert not a[rows.rank :].any()
            assert not b[rows.num_rows :].any()
            found[f"layers.{layer}.{part.module}"] = (
                y + gain * y + bias + own_x @ a[: rows.rank].T @ b[: rows.rank]
            )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [4, 6, 7, 8, 15])
def test_pages_hold_what_makes_the_outputs_of_dora_with_biases(
    tmp_path: Path, rank: int, dtype: torch.dtype
) -> None:
    """Ranks that leave room for both rows in the last page, for one, and for none."""
    base, tensors = FewWeights(), make_affine_tensors(rank=rank)
    packed = pack(tmp_path, tensors, make_config(r=rank, **AFFINE), base, dtype=dtype)
    assert packed.pages.shape[0] == -(-(rank + 2) // 8)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(3))
    for name, y in outputs(packed, base, x).items():
        module = f"base_model.model.model.{name}"
        layer, own_x = int(name.split(".")[1]), x[:, : tensors[f"{module}.lora_A.weight"].shape[1]]
        delta = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"] * ALPHA / rank
        place = next(place for place in places() if place[0] == layer and places()[place] == name)
        weight = base.weights[place] + delta
        weight *= (tensors[f"{module}.lora_magnitude_vector"] / weight.norm(dim=1))[:, None]
        bias = tensors.get(f"{module}.base_layer.bias", torch.zeros(len(weight)))
        tolerance = 1e-4 if dtype is torch.float32 else 0.15
        torch.testing.assert_close(y, own_x @ weight.T + bias, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rank", [5, 7, 8])
def test_used_pages_hold_the_same_as_new_ones(tmp_path: Path, rank: int) -> None:
    """Of rank 7 all rows of B are filled, and one of A is not."""
    write_adapter(
        tmp_path, tensors=make_affine_tensors(LAYOUT, rank), config=make_config(r=rank, use_dora=True)
    )
    packed = []
    for content in (0.0, torch.nan):
        pages = HostPages(2, RankPageLayout(LAYOUT).page_elements, torch.float32, pin_memory=False)
        pages.take(2).fill_(content)
        loader = make_loader(LAYOUT, base=FewWeights(LAYOUT), host_pages=pages)
        packed.append(loader.pack(loader.inspect(tmp_path)).pages)
    assert torch.equal(*packed)


def places() -> dict[tuple[int, str, int], str]:
    return {
        (layer, linear.name, index): f"layers.{layer}.{part.module}"
        for layer in range(BIASED.num_layers)
        for linear in BIASED.linears
        for index, part in enumerate(linear.slices)
    }


def test_the_manifest_says_what_there_is(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, tensors=make_affine_tensors(rank=15), config=make_config(r=15, **AFFINE))
    loader = make_loader(BIASED, base=FewWeights())
    manifest = loader.inspect(folder)
    assert (manifest.rank, manifest.num_pages, manifest.features) == (15, 3, ("bias", "dora"))
    packed = loader.pack(manifest)
    assert packed.nbytes == manifest.host_bytes
    assert [rows.has_bias for rows in packed.rows[0]] == [True, True, True, False, False, False, True]
    assert all(rows.rank == 15 and rows.has_gain for layer in packed.rows for rows in layer)


def test_dora_alone_has_bias_rows_where_the_base_has_a_bias(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in make_affine_tensors().items() if "bias" not in name}
    write_adapter(tmp_path, tensors=tensors, config=make_config(use_dora=True))
    loader = make_loader(BIASED, base=FewWeights())
    manifest = loader.inspect(tmp_path)
    assert manifest.features == ("dora",)
    assert loader.pack(manifest).rows[1][0] == SliceRows(RANK, has_gain=True, has_bias=True)
    assert loader.pack(manifest).rows[1][3] == SliceRows(RANK, has_gain=True)


def test_biases_of_linears_without_lora(tmp_path: Path) -> None:
    """With bias "all" they are trained too; v_proj takes a bias row and no rank."""
    base = FewWeights()
    all_tensors = make_affine_tensors()
    tensors = {name: tensor for name, tensor in make_tensors().items() if "o_proj" in name}
    for name, tensor in all_tensors.items():
        if name.endswith("base_layer.bias"):
            tensors[name.replace(".base_layer", "")] = tensor
    config = make_config(target_modules=["o_proj"], bias="all")
    write_adapter(tmp_path, tensors=tensors, config=config)
    loader = make_loader(BIASED, base=base)
    manifest = loader.inspect(tmp_path)
    assert manifest.target_modules == ("o_proj",)
    packed = loader.pack(manifest)
    assert packed.rows[0][2] == SliceRows(0, has_bias=True)
    row = RankPageLayout(BIASED).b(packed.pages, 0, "qkv_proj", 2)[0, 0]
    torch.testing.assert_close(row + base.biases[0, "qkv_proj", 2], tensors[f"{MODULE}v_proj.bias"])


def refusal(folder: Path, layout: AdapterLayout = BIASED, **loader: Any) -> str:
    made = make_loader(layout, **{"base": FewWeights(layout), **loader})
    with pytest.raises(InvalidArgumentError) as caught:
        made.pack(made.inspect(folder))
    assert [violation.field for violation in caught.value.violations] == ["source"]
    return caught.value.message


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {f"{Q0}.lora_magnitude_vector": None},
            "sets use_dora; .* has no lora_magnitude_vector of .*0.*q_proj",
        ),
        (
            {f"{Q0}.lora_magnitude_vector": torch.ones(3)},
            r"q_proj.lora_magnitude_vector' has shape \(3,\); .*16",
        ),
        ({f"{Q0}.lora_magnitude_vector": torch.ones(1, 16)}, r"has shape \(1, 16\); .* takes \(16,\)"),
        (
            {f"{Q0}.lora_magnitude_vector": torch.full((16,), torch.nan)},
            "q_proj.lora_magnitude_vector' .* NaN",
        ),
        ({f"{Q0}.lora_magnitude_vector.weight": torch.ones(16)}, "the same matrix twice"),
        ({f"{Q0}.lora_A.weight": None}, "lora_A without lora_B"),
        ({f"{Q0}.lora_B.bias": torch.ones(16)}, "lora_B.bias of .* does not set lora_bias"),
        ({f"{Q0}.base_layer.bias": None}, "has trained biases, but none of .*0.self_attn.q_proj"),
        ({f"{Q0}.base_layer.bias": torch.ones(17)}, r"q_proj.base_layer.bias' has shape \(17,\)"),
        ({f"{Q0}.base_layer.bias": torch.full((16,), torch.inf)}, "q_proj.base_layer.bias' .* NaN or inf"),
        ({f"{Q0}.bias": torch.ones(16)}, "names that PEFT would leave out; with LoRA .* base_layer.bias"),
        ({f"{O0}.base_layer.bias": torch.ones(16)}, "that have none in this base, .*o_proj.base_layer.bias"),
    ],
    ids=str,
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    """tensors: put in place of those of a whole adapter; None leaves one out."""
    changed = {**make_affine_tensors(), **tensors}
    whole = {name: tensor for name, tensor in changed.items() if tensor is not None}
    folder = write_adapter(tmp_path, tensors=whole, config=make_config(**AFFINE))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refusal(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bias": "lora_only"}, "has lora_magnitude_vector of .* does not set use_dora"),
        ({"use_dora": True}, "has trained biases, and adapter_config.json has none"),
        ({"lora_bias": True, "bias": "all"}, "does not set use_dora"),
    ],
)
def test_parts_that_the_configuration_does_not_give_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path, tensors=make_affine_tensors(), config=make_config(**config))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refusal(folder))


def test_a_base_without_biases_is_not_the_one_that_was_trained(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, tensors=make_affine_tensors(), config=make_config(**AFFINE))
    assert "biases of linears that have none in this base" in refusal(folder, LAYOUT)


def test_biases_of_linears_without_lora_need_bias_all(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in make_tensors().items() if "o_proj" in name}
    tensors[f"{Q0}.bias"] = torch.ones(16)
    config = make_config(target_modules=["o_proj"], bias="lora_only")
    assert "not trained with bias: lora_only" in refusal(
        write_adapter(tmp_path, tensors=tensors, config=config)
    )


def test_biases_that_an_older_peft_did_not_save_are_those_of_the_base(tmp_path: Path) -> None:
    write_adapter(tmp_path, config=make_config(bias="lora_only"))
    loader = make_loader(BIASED, base=FewWeights())
    manifest = loader.inspect(tmp_path)
    assert manifest.features == ()
    assert loader.pack(manifest).rows == [[SliceRows(RANK)] * 7] * 2


def test_rows_without_norm_are_refused(tmp_path: Path) -> None:
    base, tensors = FewWeights(), make_affine_tensors()
    base.weights[0, "qkv_proj", 0][5] = 0
    tensors[f"{Q0}.lora_B.weight"][5] = 0
    folder = write_adapter(tmp_path, tensors=tensors, config=make_config(**AFFINE))
    message = refusal(folder, base=base)
    assert f"{Q0}.lora_B.weight' makes rows of the weight that have no norm" in message
    assert "1 of 16" in message


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("lora_magnitude_vector", "the gain of DoRA of layer 0's self_attn.q_proj overflows torch.float16"),
        ("base_layer.bias", "the bias of layer 0's self_attn.q_proj overflows torch.float16"),
        ("lora_B.weight", "q_proj.lora_B.weight' has values that times their scale and the factor of DoRA"),
    ],
)
def test_what_overflows_the_pool_is_named(tmp_path: Path, part: str, message: str) -> None:
    """Also where the files are known from their inspection, which is long ago."""
    tensors = make_affine_tensors()
    if part == "lora_B.weight":  # a large row whose norm DoRA brings to a size at which it still overflows
        tensors[f"{Q0}.lora_B.weight"][3, 0] = 1e5
        tensors[f"{Q0}.lora_A.weight"].mul_(1e-3)
        tensors[f"{Q0}.lora_magnitude_vector"][3] = 1e3
    else:
        tensors[f"{Q0}.{part}"][3] = 1e6
        tensors[f"{Q0}.lora_B.weight"][3] = 0
    folder = write_adapter(tmp_path, tensors=tensors, config=make_config(**AFFINE))
    assert message in refusal(folder, dtype=torch.float16)
    assert message in refusal(folder, dtype=torch.float16, clock=lambda: time.time_ns() + 10**10)


def test_a_loader_without_weights_refuses_what_needs_them(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, tensors=make_affine_tensors(), config=make_config(**AFFINE))
    assert "relative to the base's weights" in refusal(folder, base=None)


numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1e38, -3e38, 6e4])


@settings(deadline=None)
@given(
    magnitude=numbers,
    b=numbers,
    bias=numbers,
    weight=st.floats(allow_nan=False, allow_infinity=False, width=32) | st.just(0.0),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_values_are_packed_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    magnitude: float,
    b: float,
    bias: float,
    weight: float,
    dtype: torch.dtype,
) -> None:
    """In one row of one linear."""
    base, tensors = FewWeights(), make_affine_tensors()
    base.weights[0, "qkv_proj", 0][7] = weight
    tensors[f"{Q0}.lora_magnitude_vector"][7] = magnitude
    tensors[f"{Q0}.lora_B.weight"][7] = b
    tensors[f"{Q0}.base_layer.bias"][7] = bias
    folder = write_adapter(tmp_path_factory.mktemp("any"), tensors=tensors, config=make_config(**AFFINE))
    loader = make_loader(BIASED, base=base, dtype=dtype)
    with suppress(InvalidArgumentError):
        assert loader.pack(loader.inspect(folder)).pages.isfinite().all()
