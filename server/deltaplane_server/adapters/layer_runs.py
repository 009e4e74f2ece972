"""Layers of an adapter whose matrices lie alike in its file, so that they can be copied together.

PEFT writes the tensors of a layer side by side and the layers in the order of their names: 0, 1, 10, 11, ...
Of 32 layers in that order, the neighbours by number that are neighbours in the file as well are 0 and 1, 4 to
9, 10 to 19, 20 to 29, and 30 and 31.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltaplane_server.adapters.lora_matrices import AdaptedSlice

ALIGNMENT = 4
"""Bytes; of the elements of any dtype."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers first to first + count - 1.

    slices: those of the first layer; each other layer's are the same ones, with A and B `stride` bytes after
        those of the layer before it.
    """

    first: int
    count: int
    stride: int
    slices: Sequence[AdaptedSlice]


def layer_runs(slices: Sequence[AdaptedSlice], num_layers: int, max_count: int) -> list[LayerRun]:
    """All layers, those that have no matrices too, in runs of at most max_count.

    slices: ordered by layer, and in each layer alike.
    """
    layers: list[list[AdaptedSlice]] = [[] for _ in range(num_layers)]
    for one in slices:
        layers[one.layer].append(one)
    runs: list[LayerRun] = []
    for layer, own in enumerate(layers):
        if runs and runs[-1].count < max_count:
            last = runs[-1]
            stride = _stride(layers[layer - 1], own)
            if stride is not None and (last.count == 1 or stride == last.stride):
                runs[-1] = LayerRun(last.first, last.count + 1, stride, last.slices)
                continue
        runs.append(LayerRun(layer, 1, 0, own))
    return runs


def _stride(former: Sequence[AdaptedSlice], own: Sequence[AdaptedSlice]) -> int | None:
    """The bytes between each tensor of a layer and the same one of the layer before; None where they are not
    the same ones, or differ in that, or do not start at multiples of their elements' size."""
    if len(former) != len(own):
        return None
    strides: set[int] = set()
    for one, other in zip(former, own, strict=True):
        if not _are_alike(one, other):
            return None
        if one.lora is not None and other.lora is not None:
            entries = one.lora.a, one.lora.b
            if any(entry.start % entry.dtype.itemsize for entry in entries):
                return None
            strides |= {other.lora.a.start - one.lora.a.start, other.lora.b.start - one.lora.b.start}
    if len(strides) > 1:
        return None
    stride = strides.pop() if strides else 0
    return stride if stride >= 0 and stride % ALIGNMENT == 0 else None


def _are_alike(one: AdaptedSlice, other: AdaptedSlice) -> bool:
    if (one.linear, one.index, one.rows) != (other.linear, other.index, other.rows):
        return False
    if one.lora is None or other.lora is None:
        return one.lora is other.lora
    return (one.lora.scale, one.lora.a.dtype, one.lora.b.dtype) == (
        other.lora.scale,
        other.lora.a.dtype,
        other.lora.b.dtype,
    )
