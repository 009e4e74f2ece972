"""Where packed weights lie in rank pages, and how they are converted."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapter_files import ALPHA, LAYOUT, RANK, make_config, make_loader, make_tensors, write_adapter
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.ports import RANK_PAGE_ROWS as PORT_RANK_PAGE_ROWS
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.rank_pages import NO_ROWS, RANK_PAGE_ROWS, RankPageLayout, SliceRows
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.host_pages import HostPages
from deltaplane_server.adapters.load_threads import LoadThreads
from deltaplane_server.adapters.packing import PackedAdapter
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.adapters.safetensors_header import DTYPES, TensorEntry
from deltaplane_server.adapters.tensor_values import tensor_of
from lora_cases import make_layout

PAGES = RankPageLayout(LAYOUT)


def pack(
    folder: Path, tensors: dict[str, Tensor], rank: int, dtype: torch.dtype = torch.float32
) -> PackedAdapter:
    loader = make_loader(dtype=dtype, max_lora_rank=64)
    write_adapter(folder, tensors=tensors, config=make_config(r=rank))
    return loader.pack(loader.inspect(folder))


def test_both_sides_mean_the_same_page() -> None:
    assert RANK_PAGE_ROWS == PORT_RANK_PAGE_ROWS


@pytest.mark.parametrize(("rank", "num_pages"), [(1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_rank_rows_fill_page_after_page_and_zeros_the_rest(tmp_path: Path, rank: int, num_pages: int) -> None:
    tensors = make_tensors(rank=rank)
    packed = pack(tmp_path, tensors, rank)
    assert packed.pages.shape == (num_pages, PAGES.page_elements)
    assert packed.rows == [[SliceRows(rank)] * 7] * 2
    assert torch.equal(packed.pages, expected_pages(tensors, ALPHA, torch.float32))


def expected_pages(
    tensors: Mapping[str, Tensor], alpha: float, dtype: torch.dtype, layout: AdapterLayout = LAYOUT
) -> Tensor:
    """The rank pages of tensors of any ranks, put together row by row."""
    ranks = [len(tensor) for name, tensor in tensors.items() if "lora_A" in name]
    places = RankPageLayout(layout)
    pages = torch.zeros(-(-max(ranks) // 8), places.page_elements, dtype=dtype)
    for layer, linear in product(range(layout.num_layers), layout.linears):
        for index, part in enumerate(linear.slices):
            name = f"base_model.model.model.layers.{layer}.{part.module}"
            if f"{name}.lora_A.weight" not in tensors:
                continue
            a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
            rows = b.float().mul(alpha / len(a)).to(dtype).T
            for row in range(len(a)):
                page, place = divmod(row, 8)
                places.a(pages, layer, linear.name)[page, index, place] = a[row].to(dtype)
                places.b(pages, layer, linear.name, index)[page, place] = rows[row]
    return pages


ODD_RANKS = {"q_proj": 1, "k_proj": 8, "v_proj": 17, "o_proj": 20, "gate_proj": 3, "up_proj": 9}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file_dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float16, torch.float32)])
@pytest.mark.parametrize("start", [0, 1])
def test_any_ranks_and_layers_are_packed_over_pages_that_held_others(
    tmp_path: Path, dtype: torch.dtype, file_dtypes: tuple[torch.dtype, ...], start: int
) -> None:
    """start: bytes that the first tensor is away from a multiple of its size."""
    generator = torch.Generator().manual_seed(start)
    tensors: dict[str, Tensor] = {}
    for name, old in make_tensors().items():
        rank = ODD_RANKS.get(name.split(".")[6], 0)
        if rank and not ("layers.0" in name and "v_proj" in name):
            shape = (rank, old.shape[1]) if "lora_A" in name else (old.shape[0], rank)
            dtype_here = file_dtypes[len(tensors) % len(file_dtypes)]
            tensors[name] = torch.randn(shape, generator=generator).to(dtype_here)
    pattern = {module: rank for module, rank in ODD_RANKS.items() if rank != 20}
    config = make_config(r=20, target_modules=rf".*({'|'.join(set(ODD_RANKS) - {'v_proj'})})|.*1\..*v_proj")
    write_adapter(tmp_path, tensors=tensors, config=config | {"rank_pattern": pattern})
    shift_body(tmp_path / WEIGHTS_FILE, start)
    pages = HostPages(4, PAGES.page_elements, dtype, pin_memory=False)
    another = pages.take(1).fill_(7)
    pages.take(3).fill_(torch.nan)
    loader = make_loader(max_lora_rank=20, dtype=dtype, host_pages=pages, threads=LoadThreads(3))
    packed = loader.pack(loader.inspect(tmp_path))
    assert pages.num_free == 0
    assert torch.equal(packed.pages, expected_pages(tensors, ALPHA, dtype))
    assert another.eq(7).all()


def shift_body(file: Path, by: int) -> None:
    """Lengthens the header by spaces, so that the tensors begin `by` bytes after a multiple of 8."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    spaces = b" " * (-end % 8 + by)
    file.write_bytes((end - 8 + len(spaces)).to_bytes(8, "little") + content[8:end] + spaces + content[end:])


FLOATS = list(DTYPES.values())


@st.composite
def layouts(draw: st.DrawFn) -> AdapterLayout:
    """With rows that are multiples of 8 elements, as in all models there are, or that leave gaps."""
    return make_layout(
        num_layers=draw(st.integers(1, 5)),
        hidden=draw(st.sampled_from([16, 13])),
        kv=draw(st.sampled_from([8, 7])),
        intermediate=draw(st.sampled_from([24, 21])),
    )


@st.composite
def adapters(draw: st.DrawFn, layout: AdapterLayout) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, in the order in which they are to lie in the file, and the configuration."""
    modules = [part.module for linear in layout.linears for part in linear.slices]
    rank = st.sampled_from([0, 1, 8, 12, 16])
    ranks = draw(
        st.sampled_from([3, 8, 16]).map(lambda one: dict.fromkeys(modules, one))
        | st.fixed_dictionaries(dict.fromkeys(modules, rank)).filter(lambda each: any(each.values()))
    )
    every = list(range(layout.num_layers))
    layers = draw(st.just(every) | st.lists(st.sampled_from(every), min_size=1, unique=True))
    dtypes = draw(st.lists(st.sampled_from(FLOATS), min_size=1, max_size=3))
    tensors: dict[str, Tensor] = {}
    for name, tensor in make_tensors(layout, rank=max(ranks.values())).items():
        layer, module = name.removeprefix("base_model.model.model.layers.").split(".", 1)
        rank_here = ranks[module.partition(".lora_")[0]]
        if rank_here and int(layer) in layers:
            part = tensor[:rank_here] if "lora_A" in name else tensor[:, :rank_here]
            tensors[name] = part.to(dtypes[len(tensors) % len(dtypes)])
    names = draw(st.just(list(tensors)) | st.permutations(list(tensors)))
    config = make_config(
        r=max(ranks.values()),
        lora_alpha=draw(st.sampled_from([5, 8, 16])),
        target_modules=[module for module, one in ranks.items() if one],
        rank_pattern={module: one for module, one in ranks.items() if one},
        layers_to_transform=layers,
    )
    return {name: tensors[name] for name in names}, config


def write_in_order(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file without regard to the alignment of tensors, which other writers have."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header, body = {}, b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_element_of_used_pages_is_written(tmp_path: Path, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    tensors, config = data.draw(adapters(layout))
    dtype = data.draw(st.sampled_from(FLOATS))
    write_adapter(tmp_path, config=config)
    write_in_order(tmp_path / WEIGHTS_FILE, tensors)
    shift_body(tmp_path / WEIGHTS_FILE, data.draw(st.integers(0, 3)))
    pages = HostPages(2, RankPageLayout(layout).page_elements, dtype, pin_memory=False)
    pages.take(2).fill_(torch.nan)
    threads = LoadThreads(data.draw(st.sampled_from([1, 2])))
    loader = make_loader(layout, dtype=dtype, host_pages=pages, threads=threads)
    packed = loader.pack(loader.inspect(tmp_path))
    assert torch.equal(packed.pages, expected_pages(tensors, config["lora_alpha"], dtype, layout))


def test_more_layers_than_a_thread_packs_at_once(tmp_path: Path) -> None:
    """11, whose names do not come in the order of their layers in a file."""
    layout = make_layout(num_layers=11, hidden=16, kv=8, intermediate=24)
    tensors = make_tensors(layout)
    for name, tensor in tensors.items():
        tensor.fill_(int(name.split(".")[4]))
    write_adapter(tmp_path, tensors=dict(sorted(tensors.items())), config=make_config(lora_alpha=RANK))
    loader = make_loader(layout, threads=LoadThreads(4))
    pages = loader.pack(loader.inspect(tmp_path)).pages
    layers = pages.view(11, RankPageLayout(layout).layer_elements)
    for layer in range(11):
        assert set(layers[layer].tolist()) == {0, layer}


@pytest.mark.parametrize("side", ["A", "B"])
def test_the_first_matrix_that_is_not_finite_is_named(tmp_path: Path, side: str) -> None:
    layout = make_layout(num_layers=12, hidden=16, kv=8, intermediate=24)
    good = make_tensors(layout)
    write_adapter(tmp_path, tensors=good)
    manifest = make_loader(layout).inspect(tmp_path)
    bad = [f"layers.{layer}.self_attn.{kind}" for layer in (10, 5, 2) for kind in ("v_proj", "k_proj")]
    for name in bad:
        good[f"base_model.model.model.{name}.lora_{side}.weight"][-1, -1] = torch.nan
    write_adapter(tmp_path, tensors=good)
    files = (tmp_path / CONFIG_FILE).read_bytes() + (tmp_path / WEIGHTS_FILE).read_bytes()
    manifest = replace(manifest, digest=hashlib.sha256(files).hexdigest())
    loader = make_loader(layout, threads=LoadThreads(4))
    for _ in range(5):
        with pytest.raises(InvalidArgumentError) as caught:
            loader.pack(manifest)
        assert f"model.layers.2.self_attn.k_proj.lora_{side}.weight' has values" in caught.value.message


def test_matrices_that_are_left_alone_are_zeros_of_rank_zero(tmp_path: Path) -> None:
    tensors = {
        name: tensor for name, tensor in make_tensors().items() if "layers.1" in name and "up_proj" in name
    }
    write_adapter(
        tmp_path, tensors=tensors, config=make_config(target_modules=["up_proj"], layers_to_transform=1)
    )
    loader = make_loader()
    packed = loader.pack(loader.inspect(tmp_path))
    assert packed.rows == [[NO_ROWS] * 7, [*[NO_ROWS] * 5, SliceRows(4), NO_ROWS]]
    own = PAGES.a(packed.pages, 1, "gate_up_proj")[0, 1].count_nonzero()
    own += PAGES.b(packed.pages, 1, "gate_up_proj", 1).count_nonzero()
    assert own == 4 * 16 + 4 * 24
    assert packed.pages.count_nonzero() == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_is_folded_in_float32_and_rounded_once(
    tmp_path: Path, dtype: torch.dtype, file_dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(file_dtype) for name, tensor in make_tensors(rank=3).items()}
    packed = pack(tmp_path, tensors, 3, dtype)
    assert packed.pages.dtype == dtype
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    a, b = tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"].float()
    assert torch.equal(PAGES.a(packed.pages, 1, "qkv_proj")[0, 1, :3], a.to(dtype))
    assert torch.equal(PAGES.b(packed.pages, 1, "qkv_proj", 1)[0, :3], (b * (ALPHA / 3)).to(dtype).T)


def test_one_loader_packs_each_adapter_as_a_loader_of_its_own_does(tmp_path: Path) -> None:
    """Of the same header and configuration, of another rank in between, and of another scale."""
    loader = make_loader(max_lora_rank=64)
    for number, (rank, alpha) in enumerate([(20, 6), (20, 6), (3, 6), (20, 5), (20, 6)]):
        tensors = {name: tensor + number for name, tensor in make_tensors(rank=rank).items()}
        folder = tmp_path / str(number)
        write_adapter(folder, tensors=tensors, config=make_config(r=rank, lora_alpha=alpha))
        own = make_loader(max_lora_rank=64)
        packed, expected = loader.pack(loader.inspect(folder)), own.pack(own.inspect(folder))
        assert torch.equal(packed.pages, expected.pages)
        assert packed.rows == expected.rows


def test_pages_come_from_the_hosts_where_it_has_some(tmp_path: Path) -> None:
    pages = HostPages(2, PAGES.page_elements, torch.float32, pin_memory=False)
    write_adapter(tmp_path, tensors=make_tensors(rank=9), config=make_config(r=9))
    own = make_loader()
    expected = own.pack(own.inspect(tmp_path)).pages
    loader = PeftLoader(LAYOUT, max_lora_rank=16, dtype=torch.float32, host_pages=pages)
    for _ in range(3):
        packed = loader.pack(loader.inspect(tmp_path))
        assert pages.num_free == 0
        assert torch.equal(packed.pages, expected)
        packed.pages.fill_(torch.nan)
        del packed


def test_values_whose_sum_overflows_are_not_taken_for_infinite(tmp_path: Path) -> None:
    largest = torch.finfo(torch.float32).max
    tensors = {name: torch.full_like(tensor, largest) for name, tensor in make_tensors().items()}
    write_adapter(tmp_path, tensors=tensors, config=make_config(lora_alpha=RANK))
    loader = make_loader()
    packed = loader.pack(loader.inspect(tmp_path))
    assert PAGES.a(packed.pages, 0, "o_proj")[0, 0, :RANK].eq(largest).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_at_odd_offsets_are_read(dtype: torch.dtype) -> None:
    values = torch.arange(6, dtype=torch.float32).to(dtype)
    entry = TensorEntry("t", dtype, (2, 3), 1, 1 + values.nbytes)
    data = torch.cat([torch.zeros(1, dtype=torch.uint8), values.view(torch.uint8)])
    assert torch.equal(tensor_of(entry, data[entry.start : entry.stop]), values.view(2, 3))
