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
    result = scaled(tensor, scale, dtype)
    if not is_finite(result):
        if not is_finite(tensor):
            raise unservable(f"{shown(entry.name)} has values that are NaN or infinite")
        factor = f"the scale {scale:g}" if isinstance(scale, float) else "their scale and the factor of DoRA"
        raise unservable(f"{shown(entry.name)} has values that times {factor} overflow {dtype}")
    return result


def scaled(tensor: Tensor, scale: "float | Tensor", dtype: torch.dtype) -> Tensor:
    """tensor * scale, which is one number or broadcast, computed in float32 and rounded once, as dtype."""
    if isinstance(scale, float) and scale == 1.0:
        return tensor if tensor.dtype == dtype else tensor.float().to(dtype)
    return tensor.float().mul(scale).to(dtype)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are."""
    return has_finite_sum(tensor) or all(math.isfinite(bound.item()) for bound in tensor.aminmax())


def has_finite_sum(tensor: Tensor) -> bool:
    """A sum that is finite says that all values are, in half the time that their bounds take; one that is not
    may have overflowed itself.

    16-bit values that lie in one piece are added in float32 as they are read. Others are copied first, and so
    they would be for a sum that is float32 itself.
    """
    return math.isfinite(tensor.sum().item())
