"""Arrays and lists of the host on their way to the device."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""In bytes: kernels are compiled for the alignment of their pointers."""


def integers_to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """[len(values)], int64, on the device. The host does not wait for a copy to a GPU."""
    source = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return source.to(device, non_blocking=True)


def to_device(arrays: Mapping[str, NDArray[np.generic]], device: torch.device) -> dict[str, Tensor]:
    """The arrays on the device, by their names, all in one copy. The host does not wait for one to a GPU:
    PyTorch keeps pinned memory from reuse until copies out of it are done."""
    sources = [torch.from_numpy(array) for array in arrays.values()]
    starts = list(accumulate((-(-s.nbytes // _ALIGNMENT) * _ALIGNMENT for s in sources), initial=0))
    block = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = block.numpy()
    for array, start in zip(arrays.values(), starts, strict=False):
        target[start : start + array.nbytes] = array.view(np.uint8)
    sent = block.to(device, non_blocking=True)
    return {
        name: sent[start : start + source.nbytes].view(source.dtype)
        for name, source, (start, _) in zip(arrays, sources, pairwise(starts), strict=True)
    }
