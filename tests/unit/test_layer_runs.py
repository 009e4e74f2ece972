"""Which layers of an adapter are packed together: those whose matrices lie alike in its file."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaplane_kernels.rank_pages import SliceRows
from deltaplane_server.adapters.layer_runs import layer_runs
from deltaplane_server.adapters.lora_matrices import AdaptedSlice, LoraMatrices
from deltaplane_server.adapters.safetensors_header import TensorEntry

RANK = 4


def matrices(
    layer: int, start: int, *, rank: int = RANK, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> AdaptedSlice:
    """A and B of 64 bytes, the one after the other. start: of A, in bytes."""
    a = TensorEntry(f"{layer}.a", dtype, (rank, 4), start, start + 64)
    b = TensorEntry(f"{layer}.b", dtype, (4, rank), start + 64, start + 128)
    lora = LoraMatrices(rank, scale, a, b)
    return AdaptedSlice(layer, "o_proj", 0, "self_attn.o_proj", SliceRows(rank), lora, None)


def bias(layer: int, start: int) -> AdaptedSlice:
    entry = TensorEntry(f"{layer}.bias", torch.float32, (4,), start, start + 16)
    return AdaptedSlice(layer, "qkv_proj", 1, "self_attn.k_proj", SliceRows(0, has_bias=True), None, entry)


def runs(
    slices: Sequence[AdaptedSlice], num_layers: int = 4, max_count: int = 4
) -> list[tuple[int, int, int]]:
    """The first layer, the number of layers and the stride of each run."""
    return [(run.first, run.count, run.stride) for run in layer_runs(slices, num_layers, max_count)]


def test_layers_that_lie_alike_are_one_run() -> None:
    slices = [matrices(layer, 1000 + 512 * layer) for layer in range(4)]
    assert runs(slices) == [(0, 4, 512)]
    assert runs(slices, max_count=3) == [(0, 3, 512), (3, 1, 0)]
    assert layer_runs(slices, 4, 4)[0].slices == slices[:1]


def test_the_order_of_names_breaks_runs() -> None:
    """0, 1, 10, 11, 2, ..., 9."""
    order = sorted(range(12), key=str)
    slices = [matrices(layer, 128 * order.index(layer)) for layer in range(12)]
    assert runs(slices, 12, 12) == [(0, 2, 128), (2, 8, 128), (10, 2, 128)]


@pytest.mark.parametrize(
    "other",
    [
        matrices(2, 256, rank=5),
        matrices(2, 256, scale=2.0),
        matrices(2, 256, dtype=torch.float16),
        matrices(2, 260),
        matrices(2, 0),
        bias(2, 256),
    ],
)
def test_a_layer_that_differs_begins_another_run(other: AdaptedSlice) -> None:
    slices = [matrices(0, 0), matrices(1, 128), other, matrices(3, 384)]
    assert runs(slices)[0] == (0, 2, 128)
    assert runs(slices)[1][0] == 2


def test_strides_that_do_not_hold_whole_elements_are_not_followed() -> None:
    assert runs([matrices(0, 0), matrices(1, 130)], 2) == [(0, 1, 0), (1, 1, 0)]


def test_layers_whose_elements_are_not_aligned_are_packed_alone() -> None:
    """Each such matrix is copied before; a run of them would be all of the file between the first and the
    last."""
    assert runs([matrices(0, 2), matrices(1, 130)], 2) == [(0, 1, 0), (1, 1, 0)]
    halves = [matrices(layer, 2 + 128 * layer, dtype=torch.float16) for layer in range(2)]
    assert runs(halves, 2) == [(0, 2, 128)]


def test_layers_without_matrices_are_packed_too() -> None:
    """They are zeros; a bias lies where it lies."""
    assert runs([matrices(1, 0)]) == [(0, 1, 0), (1, 1, 0), (2, 2, 0)]
    assert runs([bias(0, 0), bias(1, 999), bias(2, 16)], 3) == [(0, 3, 0)]


@given(
    starts=st.lists(st.integers(0, 6).map(lambda n: 64 * n), min_size=1, max_size=12),
    max_count=st.integers(1, 12),
)
def test_every_layer_is_in_one_run_and_lies_where_it_says(starts: list[int], max_count: int) -> None:
    slices = [matrices(layer, start) for layer, start in enumerate(starts)]
    covered = []
    for run in layer_runs(slices, len(starts), max_count):
        assert 1 <= run.count <= max_count
        for number in range(run.count):
            covered.append(run.first + number)
            assert starts[run.first] + number * run.stride == starts[run.first + number]
    assert covered == list(range(len(starts)))
