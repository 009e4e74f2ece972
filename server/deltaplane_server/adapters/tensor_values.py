"""Tensors out of the bytes of an adapter's file, and whether their values can be served."""

import math

import torch
from torch import Tensor

from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.unservable import shown, unservable


def tensor_of(entry: TensorEntry, data: Tensor) -> Tensor:
    """The tensor whose bytes are `data`, uint8."""
    aligned = data if data.storage_offset() % entry.dtype.itemsize == 0 else data.clone()
    return aligned.view(entry.dtype).view(entry.shape)


def converted(entry: TensorEntry, tensor: Tensor, scale: "float | Tensor", dtype: torch.dtype) -> Tensor:
    """tensor * scale, which is one number or broadcast, computed in float32, as dtype.

    Errors: InvalidArgumentError where the tensor, or the result, has a value that is not finite.
    """
    unchanged = isinstance(scale, float) and scale == 1.0 and tensor.dtype == dtype
    result = tensor if unchanged else tensor.float().mul(scale).to(dtype)
    if not is_finite(result):
        if not is_finite(tensor):
            raise unservable(f"{shown(entry.name)} has values that are NaN or infinite")
        factor = f"the scale {scale:g}" if isinstance(scale, float) else "their scale and the factor of DoRA"
        raise unservable(f"{shown(entry.name)} has values that times {factor} overflow {dtype}")
    return result


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are."""
    return has_finite_sum(tensor) or bool(tensor.isfinite().all())


def has_finite_sum(tensor: Tensor) -> bool:
    """A sum that is finite says that all values are, at a twentieth of the time that looking at each value
    takes; one that is not may have overflowed itself."""
    return math.isfinite(tensor.sum(dtype=torch.float32).item())
