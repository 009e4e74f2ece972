"""How decodes are shared out among blocks of the attention kernel, on a GPU of 132 multiprocessors."""

import pytest
import torch

from deltaplane_kernels.attention_cuda import KEYS, MAX_WARPS, SHARED_KEYS, LaunchShape, takes
from deltaplane_kernels.attention_index import MIN_SPLITS

PROCESSORS = 132


@pytest.mark.parametrize("decodes", [*range(1, 70), 128, 256])
def test_each_warp_of_a_split_has_keys(decodes: int) -> None:
    shape = LaunchShape.of(decodes * 8, PROCESSORS)
    assert shape.least_keys >= shape.warps * KEYS
    assert shape.least_keys % KEYS == 0
    assert shape.most_splits >= MIN_SPLITS


def test_few_decodes_have_large_blocks_and_share_their_keys() -> None:
    assert LaunchShape.of(8, PROCESSORS) == (MAX_WARPS, False, 16, 2 * MAX_WARPS * KEYS)
    assert LaunchShape.of(128, PROCESSORS) == (MAX_WARPS, True, MIN_SPLITS, SHARED_KEYS)


def test_many_decodes_have_small_blocks() -> None:
    shapes = [LaunchShape.of(decodes * 8, PROCESSORS) for decodes in (24, 33, 34, 256)]
    assert [shape.warps for shape in shapes] == [4, 4, 2, 2]
    assert all(shape.fills_device for shape in shapes)


def test_a_cpu_is_left_to_others() -> None:
    q, kv = torch.zeros(3, 8, 64, dtype=torch.bfloat16), torch.zeros(4, 2, 2, 16, 64, dtype=torch.bfloat16)
    assert not takes(q, kv)
