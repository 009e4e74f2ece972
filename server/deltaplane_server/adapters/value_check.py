"""Checks that the values of an adapter's file can be served: finite, and finite times their scale.

Many tensors are looked at by one call. What a call costs is little for one adapter, but each lets go of the
GIL and waits to get it back, which is most of the time where several adapters are checked beside running
streams.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deltaplane_server.adapters.files import AdapterFile
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.tensor_values import converted, has_finite_sum, tensor_of

SPAN_BYTES = 8 << 20
"""Looked at together; a larger tensor is looked at alone."""

_ROUNDING = 1.01
"""More than rounding to any dtype adds to a value."""


def check_values(file: AdapterFile, scales: Mapping[TensorEntry, float], dtype: torch.dtype) -> None:
    """Reads the tensors, which are the rest of the file, and checks that each times its scale is finite in
    dtype.

    scales: of all tensors of the file, at least one.
    Errors: InvalidArgumentError, which names the first tensor whose values are not.
    """
    spans = list(_spans(sorted(scales, key=lambda entry: entry.start)))
    buffer = torch.empty(max(span[-1].stop - span[0].start for span in spans), dtype=torch.uint8)
    for span in spans:
        start, stop = span[0].start, span[-1].stop
        data = buffer[: stop - start]
        file.read_into(data.numpy().data)
        highest = max(abs(scales[entry]) for entry in span)
        if not _all_finite(data.view(span[0].dtype), highest, dtype):
            for entry in span:
                tensor = tensor_of(entry, data[entry.start - start : entry.stop - start])
                converted(entry, tensor, scales[entry], dtype)


def _spans(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Neighbours of one dtype, of at most SPAN_BYTES together, or one that is larger."""
    span: list[TensorEntry] = []
    for entry in entries:
        if span and (entry.dtype != span[0].dtype or entry.stop - span[0].start > SPAN_BYTES):
            yield span
            span = []
        span.append(entry)
    if span:
        yield span


def _all_finite(values: Tensor, scale: float, dtype: torch.dtype) -> bool:
    """Whether all values, times a scale of at most `scale`, are finite in dtype. False may be wrong: a sum
    may overflow where no value is infinite."""
    if not has_finite_sum(values):
        return False
    room = torch.finfo(dtype).max / torch.finfo(values.dtype).max
    if scale * _ROUNDING <= room or not values.numel():
        return True
    low, high = (float(bound) for bound in values.aminmax())
    return max(-low, high) * scale * _ROUNDING <= torch.finfo(dtype).max
