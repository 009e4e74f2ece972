"""From a PEFT folder through loader and pool to deltas on rows, beside PEFT's own mathematics."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import peft_factory
from adapter_files import make_loader, write_adapter
from deltaplane_controlplane.ports import DevicePool
from deltaplane_kernels.lora import RankPagePool
from deltaplane_server.adapters.adapter_pool import AdapterPool
from deltaplane_server.adapters.packing import PackedAdapter
from deltaplane_server.adapters.peft_loader import PeftLoader
from lora_cases import make_layout

LAYOUT = make_layout()
QKV = LAYOUT.linears[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_factory.make_tiny_model(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        peft_factory.make_adapter(base, root / "all", rank=8, alpha=16, seed=1),
        peft_factory.make_adapter(
            base, root / "qv", rank=12, alpha=7, modules=["q_proj", "v_proj"], rslora=True, seed=2
        ),
    ]


def make_pool(dtype: torch.dtype = torch.float32) -> AdapterPool:
    return AdapterPool(RankPagePool(LAYOUT, num_pages=4, num_slots=2, dtype=dtype))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PackedAdapter:
    loader = PeftLoader(LAYOUT, max_lora_rank=16, dtype=dtype)
    return loader.pack(loader.inspect(folder))


def qkv_delta_of_peft(base: Path, adapter: Path, layer: int, x: Tensor) -> Tensor:
    """What PEFT adds to q, k and v for x, side by side; zeros where it adapts none."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    )
    adapted = peft_factory.adapted_linears(model)
    deltas = []
    for part in QKV.slices:
        linear = adapted.get(f"model.layers.{layer}.{part.module}")
        weight = torch.zeros(part.out_features, 64) if linear is None else linear.get_delta_weight("default")
        deltas.append(x @ weight.detach().T)
    return torch.cat(deltas, dim=1)


def test_it_is_the_port_of_the_adapter_manager() -> None:
    pool: DevicePool = make_pool()
    assert (pool.num_slots, pool.num_pages) == (2, 4)
    assert pool.page_bytes == 2 * 8 * (3 * 64 + 128 + 64 + 64 + 2 * 64 + 256 + 128 + 64) * 4


def test_a_mixed_step_adds_what_peft_adds(base: Path, adapters: list[Path]) -> None:
    pool = make_pool()
    pool.copy_in(1, [2], load(adapters[0]))
    pool.copy_in(0, [3, 1], load(adapters[1]))
    pool.check_integrity()
    step = pool.step([(1, 1), (0, 1), (-1, 1), (1, 2), (0, 1)])
    assert step is not None
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    for layer in range(LAYOUT.num_layers):
        y = torch.zeros(6, QKV.out_features)
        step.add_delta(layer, "qkv_proj", x, y)
        expected = torch.zeros_like(y)
        expected[[0, 3, 4]] = qkv_delta_of_peft(base, adapters[0], layer, x[[0, 3, 4]])
        expected[[1, 5]] = qkv_delta_of_peft(base, adapters[1], layer, x[[1, 5]])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_a_slot_is_cleared_and_bound_to_another_adapter(base: Path, adapters: list[Path]) -> None:
    pool = make_pool()
    x = torch.randn(1, 64)
    for folder, pages in zip(adapters, ([0], [1, 0]), strict=True):
        pool.copy_in(0, pages, load(folder))
        step = pool.step([(0, 1)])
        assert step is not None
        y = torch.zeros(1, QKV.out_features)
        step.add_delta(1, "qkv_proj", x, y)
        torch.testing.assert_close(y, qkv_delta_of_peft(base, folder, 1, x), rtol=1e-4, atol=1e-5)
        pool.clear(0)
    assert pool.step([(-1, 4)]) is None
    pool.check_integrity()


def test_a_bfloat16_pool_is_close_to_peft_in_float32(base: Path, adapters: list[Path]) -> None:
    pool = make_pool(torch.bfloat16)
    pool.copy_in(0, [0], load(adapters[0], torch.bfloat16))
    step = pool.step([(0, 5)])
    assert step is not None
    x = torch.randn(5, 64).bfloat16()
    y = torch.zeros(5, QKV.out_features, dtype=torch.bfloat16)
    step.add_delta(0, "qkv_proj", x, y)
    expected = qkv_delta_of_peft(base, adapters[0], 0, x.float())
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)


def test_adapters_of_others_are_refused() -> None:
    class Foreign:
        nbytes = 1
        read_ms = pack_ms = 0.0

    with pytest.raises(TypeError, match="Foreign is not a PackedAdapter"):
        make_pool().copy_in(0, [0], Foreign())


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    loader = make_loader()
    packed = loader.pack(loader.inspect(write_adapter(tmp_path)))
    pool = make_pool()
    with pytest.raises(ValueError, match="pages of this pool"):
        pool.copy_in(0, [0], packed)
    pool.check_integrity()
