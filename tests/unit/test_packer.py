"""Where packed weights lie in rank pages, and how they are converted."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapter_files import ALPHA, LAYOUT, make_config, make_loader, make_tensors, write_adapter
from deltaplane_controlplane.ports import RANK_PAGE_ROWS as PORT_RANK_PAGE_ROWS
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, RankPageLayout
from deltaplane_server.adapters.packing import PackedAdapter, tensor_of
from deltaplane_server.adapters.safetensors_header import TensorEntry

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
    assert packed.ranks == [[rank] * 7] * 2
    rebuilt = torch.zeros_like(packed.pages)
    for layer in range(LAYOUT.num_layers):
        for linear in LAYOUT.linears:
            for index, part in enumerate(linear.slices):
                name = f"base_model.model.model.layers.{layer}.{part.module}"
                a = tensors[f"{name}.lora_A.weight"]
                b = tensors[f"{name}.lora_B.weight"].T * (ALPHA / rank)
                for row in range(rank):
                    page, place = divmod(row, 8)
                    PAGES.a(rebuilt, layer, linear.name)[page, index, place] = a[row]
                    PAGES.b(rebuilt, layer, linear.name, index)[page, place] = b[row]
    assert torch.equal(packed.pages, rebuilt)


def test_matrices_that_are_left_alone_are_zeros_of_rank_zero(tmp_path: Path) -> None:
    tensors = {
        name: tensor for name, tensor in make_tensors().items() if "layers.1" in name and "up_proj" in name
    }
    write_adapter(
        tmp_path, tensors=tensors, config=make_config(target_modules=["up_proj"], layers_to_transform=1)
    )
    loader = make_loader()
    packed = loader.pack(loader.inspect(tmp_path))
    assert packed.ranks == [[0] * 7, [0, 0, 0, 0, 0, 4, 0]]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_at_odd_offsets_are_read(dtype: torch.dtype) -> None:
    values = torch.arange(6, dtype=torch.float32).to(dtype)
    entry = TensorEntry("t", dtype, (2, 3), 1, 1 + values.nbytes)
    data = torch.cat([torch.zeros(1, dtype=torch.uint8), values.view(torch.uint8)])
    assert torch.equal(tensor_of(entry, data[entry.start : entry.stop]), values.view(2, 3))
