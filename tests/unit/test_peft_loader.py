"""Adapter folders as files: what is read, what is refused and why, and files that change or go away."""

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapter_files import ALPHA, RANK, make_config, make_loader, make_tensors, write_adapter
from deltaplane_controlplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.rank_pages import SliceRows
from deltaplane_server.adapters import peft_loader
from deltaplane_server.adapters.adapter_plan import FileContents, contents_of
from deltaplane_server.adapters.files import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE, Digest
from deltaplane_server.adapters.page_writes import PageWrites
from deltaplane_server.adapters.peft_config import MAX_CONFIG_BYTES
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.adapters.safetensors_header import SafetensorsHeader
from lora_cases import make_layout

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN1 = "base_model.model.model.layers.1.mlp.down_proj"


def refusal(folder: Path, **loader: Any) -> str:
    """Why inspect refuses the folder."""
    with pytest.raises(InvalidArgumentError) as caught:
        make_loader(**loader).inspect(folder)
    assert [violation.field for violation in caught.value.violations] == ["source"]
    assert len(caught.value.message) < 2000
    return caught.value.message


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path / "a",
        config=make_config(use_rslora=True, base_model_name_or_path="org/base", lora_alpha=6.5),
    )
    files = (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()
    assert make_loader().inspect(folder) == AdapterManifest(
        source=str(folder),
        digest=hashlib.sha256(files[0] + files[1]).hexdigest(),
        rank=RANK,
        alpha=6.5,
        rslora=True,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        num_layers=2,
        source_bytes=len(files[0]) + len(files[1]),
        host_bytes=2 * 8 * (3 * 16 + 32 + 16 + 16 + 2 * 16 + 48 + 24 + 16) * 4,
        num_pages=1,
        base_model="org/base",
        rank_pattern={},
    )


def test_the_manifest_says_which_ranks_differ(tmp_path: Path) -> None:
    tensors = make_tensors()
    for name in list(tensors):
        if "q_proj" in name:
            tensors[name] = tensors[name][:2] if "lora_A" in name else tensors[name][:, :2]
        elif "layers.1.mlp.up_proj" in name:
            tensors[name] = tensors[name][:1] if "lora_A" in name else tensors[name][:, :1]
    config = make_config(rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 1})
    manifest = make_loader().inspect(write_adapter(tmp_path / "a", tensors=tensors, config=config))
    assert manifest.rank == RANK
    assert manifest.rank_pattern == {"q_proj": 2, "layers.1.mlp.up_proj": 1}


def test_the_manifest_of_a_partial_adapter(tmp_path: Path) -> None:
    tensors = {
        name: tensor for name, tensor in make_tensors().items() if "layers.1" in name and "v_proj" in name
    }
    config = make_config(target_modules=["v_proj"], layers_to_transform=[1])
    manifest = make_loader().inspect(write_adapter(tmp_path / "a", tensors=tensors, config=config))
    assert manifest.target_modules == ("v_proj",)
    assert manifest.num_layers == 1


def test_what_was_inspected_is_packed(tmp_path: Path) -> None:
    loader = make_loader()
    manifest = loader.inspect(write_adapter(tmp_path / "a"))
    packed = loader.pack(manifest)
    assert packed.nbytes == manifest.host_bytes
    assert packed.rows == [[SliceRows(RANK)] * 7] * 2
    assert packed.read_ms > 0
    assert packed.pack_ms > 0


def test_names_that_many_files_have_are_sorted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their configurations say, such as the alpha of each."""
    read = []

    def counted(header: SafetensorsHeader, layout: AdapterLayout) -> FileContents:
        read.append(header)
        return contents_of(header, layout)

    monkeypatch.setattr(peft_loader, "contents_of", counted)
    loader = make_loader()
    folders = [write_adapter(tmp_path / f"{n}", config=make_config(lora_alpha=n)) for n in (8, 16)]
    one, other = (loader.pack(loader.inspect(folder)).pages for folder in folders)
    assert len(read) == 1
    assert not one.equal(other)


# Names


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.",
        "base_model.model.model.language_model.",
        "base_model.model.language_model.model.",
        "base_model.model.language_model.",
        "base_model.model.",
        "model.",
        "model.language_model.",
        "",
    ],
)
@pytest.mark.parametrize(
    "infix", [(".lora_", ".lora_"), (".weight", ".default.weight"), (".lora_", ".base_layer.lora_")]
)
def test_names_of_other_tools_mean_the_same(tmp_path: Path, prefix: str, infix: tuple[str, str]) -> None:
    loader = make_loader()
    plain = loader.pack(loader.inspect(write_adapter(tmp_path / "plain")))
    tensors = renamed(make_tensors(prefix=prefix), *infix)
    other = loader.pack(loader.inspect(write_adapter(tmp_path / "other", tensors=tensors)))
    assert torch.equal(other.pages, plain.pages)
    assert other.rows == plain.rows


def test_patterns_are_matched_against_the_names_of_the_base_it_was_trained_on(tmp_path: Path) -> None:
    tensors = make_tensors(prefix="base_model.model.model.language_model.")
    config = make_config(target_modules=r"model\.language_model\.layers\.\d+\..*_proj")
    make_loader().inspect(write_adapter(tmp_path / "a", tensors=tensors, config=config))
    config = make_config(target_modules=r"model\.layers\.\d+\..*_proj")
    message = refusal(write_adapter(tmp_path / "b", tensors=tensors, config=config))
    assert "does not target" in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self_attn.q_proj", "attention.wq"),
        ("base_model.model.model.", "base_model.model.vision_tower."),
        ("layers.", "h."),
        ("layers.0.", "layers.00."),
        ("layers.0.", "layers.-1."),
        ("layers.0.", "layers.9999999."),
        (".lora_A", ".lora_C"),
        (".weight", ".other_name.weight"),
        ("q_proj", "q_proj.lora_A.q_proj"),
    ],
)
def test_names_that_match_nothing_are_listed(tmp_path: Path, old: str, new: str) -> None:
    message = refusal(write_adapter(tmp_path / "a", tensors=renamed(make_tensors(), old, new)))
    assert "belong to no linear of this base" in message
    assert new in message
    assert "self_attn.q_proj" in message


def test_some_names_that_match_nothing_are_an_error_too(tmp_path: Path) -> None:
    tensors = make_tensors() | {"something.else": torch.ones(2)}
    message = refusal(write_adapter(tmp_path / "a", tensors=tensors))
    assert "belong to no linear of this base: 'something.else'" in message


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    tensors = {f"{'x' * 1000}.{number}": torch.ones(1) for number in range(300)}
    assert "and 295 more" in refusal(write_adapter(tmp_path / "a", tensors=tensors))


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("base_model.model.lm_head.lora_A.weight", "lm_head"),
        ("base_model.model.lm_head.modules_to_save.weight", "modules_to_save"),
        ("base_model.model.lm_head.weight", "lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embed_tokens"),
        ("base_model.model.model.embed_tokens.base_layer.weight", "embed_tokens"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "token embeddings"),
    ],
)
def test_weights_of_features_are_refused_by_the_feature(tmp_path: Path, name: str, feature: str) -> None:
    message = refusal(write_adapter(tmp_path / "a", tensors=make_tensors() | {name: torch.ones(4)}))
    assert "holds what is not served" in message
    assert feature in message
    assert name in message


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_targets_outside_of_the_layers_are_refused_where_the_base_takes_none(
    tmp_path: Path, target: str
) -> None:
    config = make_config(target_modules=[*make_config()["target_modules"], target])
    message = refusal(write_adapter(tmp_path / "a", config=config))
    assert f"targets '{target.removeprefix('model.')}'; this base takes no LoRA there" in message


def test_a_matrix_without_its_partner_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors[f"{Q0}.lora_B.weight"]
    message = refusal(write_adapter(tmp_path / "a", tensors=tensors))
    assert "lora_A without lora_B" in message
    assert Q0 in message


def test_the_same_matrix_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[f"{Q0}.lora_A.default.weight"] = tensors[f"{Q0}.lora_A.weight"].clone()
    assert "the same matrix twice" in refusal(write_adapter(tmp_path / "a", tensors=tensors))


def test_mixed_prefixes_are_refused(tmp_path: Path) -> None:
    tensors = renamed(make_tensors(), "base_model.model.model.layers.1.", "model.layers.1.")
    assert "mixes names" in refusal(write_adapter(tmp_path / "a", tensors=tensors))


# What the configuration targets, and what is there


def test_weights_that_are_not_targeted_are_refused(tmp_path: Path) -> None:
    message = refusal(write_adapter(tmp_path / "a", config=make_config(target_modules=["q_proj", "v_proj"])))
    assert "PEFT would leave them out" in message
    assert "model.layers.0.mlp.down_proj" in message


def test_targets_without_weights_are_refused(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in make_tensors().items() if "0.self_attn.k_proj" not in name}
    message = refusal(write_adapter(tmp_path / "a", tensors=tensors))
    assert "targets modules that have no weights: 'model.layers.0.self_attn.k_proj'" in message


def test_targets_that_the_base_does_not_have_are_refused(tmp_path: Path) -> None:
    config = make_config(target_modules=[*make_config()["target_modules"], "c_attn"])
    assert "not in this base: 'c_attn'" in refusal(write_adapter(tmp_path / "a", config=config))


def test_targets_default_to_q_and_v(tmp_path: Path) -> None:
    config = make_config(target_modules=None)
    assert "PEFT would leave them out" in refusal(write_adapter(tmp_path / "a", config=config))
    tensors = {
        name: tensor for name, tensor in make_tensors().items() if "q_proj" in name or "v_proj" in name
    }
    make_loader().inspect(write_adapter(tmp_path / "b", tensors=tensors, config=config))


def test_an_adapter_for_more_layers_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors(make_layout(num_layers=5, hidden=16, kv=8, intermediate=24))
    message = refusal(write_adapter(tmp_path / "a", tensors=tensors))
    assert "weights for layer 4; this base has 2 layers (0 to 1)" in message


def test_an_adapter_for_fewer_layers_is_refused(tmp_path: Path) -> None:
    deeper = make_layout(num_layers=3, hidden=16, kv=8, intermediate=24)
    message = refusal(write_adapter(tmp_path / "a"), layout=deeper)
    assert "weights for layers 0 to 1; this base has 3 layers" in message


def test_layers_that_the_base_does_not_have_are_refused(tmp_path: Path) -> None:
    message = refusal(write_adapter(tmp_path / "a", config=make_config(layers_to_transform=[0, 1, 7])))
    assert "'7' in layers_to_transform; this base has 2 layers (0 to 1)" in message


def test_an_adapter_for_another_hidden_size_is_refused_with_both_shapes(tmp_path: Path) -> None:
    wider = make_layout(num_layers=2, hidden=32, kv=8, intermediate=24)
    message = refusal(write_adapter(tmp_path / "a"), layout=wider)
    assert "(4, 16)" in message
    assert "(4, 32)" in message


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (f"{Q0}.lora_A.weight", (3, 16), "(4, 16)"),
        (f"{Q0}.lora_B.weight", (16, 3), "(16, 4)"),
        (f"{Q0}.lora_B.weight", (4, 16), "(16, 4)"),
        (f"{DOWN1}.lora_A.weight", (4, 24, 1, 1), "(4, 24)"),
        (f"{DOWN1}.lora_A.weight", (96,), "(4, 24)"),
        (f"{DOWN1}.lora_A.weight", (0, 24), "(4, 24)"),
        (f"{DOWN1}.lora_A.weight", (), "(4, 24)"),
    ],
)
def test_wrong_shapes_are_refused_with_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...], wanted: str
) -> None:
    message = refusal(write_adapter(tmp_path / "a", tensors=make_tensors() | {name: torch.ones(shape)}))
    assert name in message
    assert str(shape) in message
    assert wanted in message


def test_another_rank_than_the_configuration_has_is_refused(tmp_path: Path) -> None:
    message = refusal(write_adapter(tmp_path / "a", config=make_config(r=8)))
    assert "(4, 16)" in message
    assert "(8, 16)" in message


def test_a_rank_over_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", tensors=make_tensors(rank=9), config=make_config(r=9))
    make_loader(max_lora_rank=9).inspect(folder)
    message = refusal(folder, max_lora_rank=8)
    assert "rank 9" in message
    assert "--max-lora-rank 8" in message


# Values


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors().items()}
    tensors[f"{DOWN1}.lora_B.weight"][-1, -1] = value
    message = refusal(write_adapter(tmp_path / "a", tensors=tensors))
    assert f"{DOWN1}.lora_B.weight' has values that are NaN or infinite" in message


def test_values_that_overflow_the_pool_are_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[f"{DOWN1}.lora_B.weight"][0, 0] = 60000.0
    folder = write_adapter(tmp_path / "a", tensors=tensors)
    make_loader(dtype=torch.bfloat16).inspect(folder)
    message = refusal(folder, dtype=torch.float16)
    assert f"{DOWN1}.lora_B.weight' has values that times the scale {ALPHA / RANK:g} overflow" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int64])
def test_other_types_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = make_tensors() | {f"{Q0}.lora_A.weight": torch.ones(RANK, 16, dtype=dtype)}
    assert "F32, F16, BF16 are served" in refusal(write_adapter(tmp_path / "a", tensors=tensors))


# Files


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file or directory" in refusal(tmp_path / "none")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    assert "Not a directory" in refusal(write_adapter(tmp_path / "a") / CONFIG_FILE)


def test_a_path_with_a_nul() -> None:
    assert "cannot be opened as a folder" in refusal(Path("a\0b"))


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / name).unlink()
    assert f"{folder} has no {name}" in refusal(folder)


def test_a_pickle_in_place_of_safetensors(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    torch.save(make_tensors(), folder / PICKLE_FILE)
    assert "convert it" in refusal(folder)
    (folder / PICKLE_FILE).rename(folder / WEIGHTS_FILE)
    assert "is a pickle" in refusal(folder)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    target = (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(target)
    assert f"{name} is a symbolic link" in refusal(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name} is not a regular file" in refusal(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{name} is not a regular file" in refusal(folder)
    (folder / name).rmdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / name))
        assert f"{name} cannot be opened" in refusal(folder)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / name).write_bytes(b"")
    assert name in refusal(folder)


def test_a_config_over_the_limit(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    with (folder / CONFIG_FILE).open("ab") as file:
        file.truncate(1 << 40)
    assert f"at most {MAX_CONFIG_BYTES} are read" in refusal(folder)


def test_weights_of_a_terabyte_are_refused_before_they_are_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    with (folder / WEIGHTS_FILE).open("ab") as file:
        file.truncate(1 << 40)
    assert "cut off or damaged" in refusal(folder)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    loader = make_loader()
    folder = write_adapter(tmp_path / "a")
    before = os.listdir("/proc/self/fd")
    loader.pack(loader.inspect(folder))
    (folder / WEIGHTS_FILE).write_bytes(b"damaged")
    refusal(folder)
    (folder / WEIGHTS_FILE).unlink()
    refusal(folder)
    assert os.listdir("/proc/self/fd") == before


# Files that change after they were inspected


def pack_error(folder: Path, change: Any) -> str:
    loader = make_loader()
    manifest = loader.inspect(folder)
    change()
    with pytest.raises(FailedPreconditionError) as caught:
        loader.pack(manifest)
    return caught.value.message


def test_weights_that_changed_are_not_packed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    changed = make_tensors()
    changed[f"{Q0}.lora_A.weight"][0, 0] += 1
    message = pack_error(folder, lambda: write_adapter(folder, tensors=changed))
    assert "changed since registration; update the adapter" in message


def test_a_config_that_changed_is_not_packed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    message = pack_error(folder, lambda: write_adapter(folder, config=make_config(lora_alpha=7)))
    assert "changed since registration; update the adapter" in message


def test_weights_that_are_damaged_since_are_told_as_changed(tmp_path: Path) -> None:
    """Not by the first damage that packing comes upon."""
    folder = write_adapter(tmp_path / "a")
    weights = folder / WEIGHTS_FILE
    for damage in (b"damaged!", weights.read_bytes()[:8] + b"{]"):
        content = damage + weights.read_bytes()[len(damage) :]
        message = pack_error(folder, lambda content=content: weights.write_bytes(content))
        assert "changed since registration; update the adapter" in message
        write_adapter(folder)


def test_files_of_another_size_are_not_packed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    weights = folder / WEIGHTS_FILE
    message = pack_error(folder, lambda: weights.write_bytes(weights.read_bytes() + b"x"))
    assert "changed since registration; update the adapter" in message


def test_files_that_are_gone_are_not_packed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    message = pack_error(folder, lambda: shutil.rmtree(folder))
    assert "can no longer be read" in message
    assert str(folder) in message


def test_an_adapter_of_another_base_is_not_packed(tmp_path: Path) -> None:
    """A catalogue may outlive the base it was made for."""
    manifest = make_loader().inspect(write_adapter(tmp_path / "a"))
    wider = make_layout(num_layers=2, hidden=32, kv=8, intermediate=24)
    with pytest.raises(InvalidArgumentError, match=r"\(4, 32\)"):
        make_loader(wider).pack(manifest)


# Files that are not hashed again


class Hashing:
    """A loader's digests, counted, and its clock.

    settled: whether files look older than two seconds to it.
    """

    def __init__(self, *, settled: bool) -> None:
        self.settled = settled
        self.num_digests = 0

    def make_loader(self) -> PeftLoader:
        return make_loader(sha256=self._sha256, clock=self._clock)

    def _sha256(self) -> Digest:
        self.num_digests += 1
        return hashlib.sha256()

    def _clock(self) -> int:
        return time.time_ns() + 10**10 * self.settled


def test_files_that_are_as_they_were_are_hashed_once(tmp_path: Path) -> None:
    hashing = Hashing(settled=True)
    loader = hashing.make_loader()
    manifest = loader.inspect(write_adapter(tmp_path / "a"))
    expected = make_loader().pack(manifest).pages
    for _ in range(2):
        assert torch.equal(loader.pack(manifest).pages, expected)
    assert hashing.num_digests == 1


def test_files_are_hashed_each_time_until_they_are_settled(tmp_path: Path) -> None:
    hashing = Hashing(settled=False)
    loader = hashing.make_loader()
    manifest = loader.inspect(write_adapter(tmp_path / "a"))
    loader.pack(manifest)
    loader.pack(manifest)
    assert hashing.num_digests == 3
    hashing.settled = True
    loader.pack(manifest)
    loader.pack(manifest)
    assert hashing.num_digests == 4


def test_a_new_loader_hashes_them_once_more(tmp_path: Path) -> None:
    manifest = make_loader().inspect(write_adapter(tmp_path / "a"))
    hashing = Hashing(settled=True)
    loader = hashing.make_loader()
    loader.pack(manifest)
    loader.pack(manifest)
    assert hashing.num_digests == 1


@pytest.mark.parametrize("settled", [True, False])
def test_values_of_files_that_are_as_they_were_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: bool
) -> None:
    looks: list[PageWrites] = []
    look = PageWrites.has_finite_sums

    def counted(writes: PageWrites) -> bool:
        looks.append(writes)
        return look(writes)

    monkeypatch.setattr(PageWrites, "has_finite_sums", counted)
    loader, other = (Hashing(settled=settled).make_loader() for _ in range(2))
    manifest = loader.inspect(write_adapter(tmp_path / "a"))
    for one, expected in ((loader, not settled), (other, True), (other, not settled)):
        looks.clear()
        one.pack(manifest)
        assert bool(looks) is expected


def test_values_that_were_refused_are_refused_again(tmp_path: Path) -> None:
    """Though their digest is known."""
    manifest = make_loader().inspect(write_adapter(tmp_path))
    tensors = make_tensors()
    tensors[f"{Q0}.lora_A.weight"][0, 0] = torch.nan
    write_adapter(tmp_path, tensors=tensors)
    files = (tmp_path / CONFIG_FILE).read_bytes() + (tmp_path / WEIGHTS_FILE).read_bytes()
    manifest = replace(manifest, digest=hashlib.sha256(files).hexdigest())
    hashing = Hashing(settled=True)
    loader = hashing.make_loader()
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"q_proj\.lora_A\.weight' has values"):
            loader.pack(manifest)
    assert hashing.num_digests == 1


def write_over(path: Path) -> None:
    """Other bytes in the same file, of the same number and with the same times but for the ctime."""
    old = path.stat()
    content = path.read_bytes()
    while path.stat().st_ctime_ns == old.st_ctime_ns:  # it is coarse
        path.write_bytes(content[:-9] + content[-9:][::-1])
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    new = path.stat()
    assert (new.st_size, new.st_mtime_ns, new.st_ino) == (old.st_size, old.st_mtime_ns, old.st_ino)


def replace_file(path: Path) -> None:
    """Another file of the same size and mtime."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    write_over(other)
    other.replace(path)


@pytest.mark.parametrize("change", [write_over, replace_file])
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_other_bytes_of_the_same_number_and_mtime_are_found(
    tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    hashing = Hashing(settled=True)
    loader = hashing.make_loader()
    folder = write_adapter(tmp_path / "a")
    manifest = loader.inspect(folder)
    change(folder / name)
    for _ in range(2):
        with pytest.raises(FailedPreconditionError, match="changed since registration"):
            loader.pack(manifest)
    assert hashing.num_digests == 2


def test_a_version_is_not_taken_for_another_that_is_known_as_well(tmp_path: Path) -> None:
    loader = Hashing(settled=True).make_loader()
    folder, elsewhere = write_adapter(tmp_path / "a"), tmp_path / "b"
    first = loader.inspect(folder)
    folder.rename(elsewhere)
    write_adapter(folder, tensors={name: tensor + 1 for name, tensor in make_tensors().items()})
    second = loader.inspect(folder)
    with pytest.raises(FailedPreconditionError, match="changed since registration"):
        loader.pack(first)
    pages = loader.pack(replace(first, source=str(elsewhere))).pages
    assert not torch.equal(loader.pack(second).pages, pages)


def test_the_same_bytes_with_other_times_are_hashed_once_more(tmp_path: Path) -> None:
    hashing = Hashing(settled=True)
    loader = hashing.make_loader()
    folder = write_adapter(tmp_path / "a")
    manifest = loader.inspect(folder)
    os.utime(folder / WEIGHTS_FILE, ns=(0, 0))
    loader.pack(manifest)
    loader.pack(manifest)
    assert hashing.num_digests == 2


# Damage of all kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("fuzz") / "a")


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    """Whatever happens to the bytes: a manifest or an InvalidArgumentError, no crash, hang or other error."""
    name = data.draw(st.sampled_from([CONFIG_FILE, WEIGHTS_FILE]))
    good = (folder / name).read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little") if name == WEIGHTS_FILE else len(good)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header_end) | st.integers(0, len(good)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "delete"])):
            case "flip" if place < len(bad):
                bad[place] ^= data.draw(st.integers(1, 255))
            case "cut":
                del bad[place:]
            case "insert":
                bad[place:place] = data.draw(st.binary(min_size=1, max_size=20))
            case "delete":
                del bad[place : place + data.draw(st.integers(1, 20))]
    try:
        (folder / name).write_bytes(bad)
        manifest = make_loader().inspect(folder)
    except InvalidArgumentError as error:
        assert len(error.message) < 2000  # noqa: PT017  # both outcomes are right
    else:
        assert make_loader().pack(manifest).pages.isfinite().all()
    finally:
        (folder / name).write_bytes(good)
