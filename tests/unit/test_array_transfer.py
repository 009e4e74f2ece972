"""Arrays that go to the device together."""

from typing import Any

import numpy as np
import pytest
import torch

from deltaplane_server.execution.array_transfer import integers_to_device, to_device


def test_arrays_arrive_with_their_types_and_at_aligned_places() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "three": np.array([1, 2, 3], dtype=np.int32),
        "none": np.array([], dtype=np.int64),
        "one": np.array([0.5], dtype=np.float32),
        "two": np.array([-(2**63), 2**63 - 1], dtype=np.int64),
    }
    sent = to_device(arrays, torch.device("cpu"))
    assert list(sent) == list(arrays)
    for name, array in arrays.items():
        assert torch.equal(sent[name], torch.from_numpy(array))
        assert sent[name].dtype == torch.from_numpy(array).dtype
        assert sent[name].storage_offset() * sent[name].itemsize % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent.values()}) == 1


@pytest.mark.parametrize("values", [[], [3], [0, 2**63 - 1, -(2**63)]])
def test_integers(values: list[int]) -> None:
    sent = integers_to_device(values, torch.device("cpu"))
    assert (sent.tolist(), sent.dtype) == (values, torch.int64)


def test_no_arrays() -> None:
    assert to_device({}, torch.device("cpu")) == {}
