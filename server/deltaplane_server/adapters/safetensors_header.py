"""The header of a safetensors file, read strictly.

A file is an 8-byte little-endian length, that many bytes of JSON (name to dtype, shape and data_offsets), and
the tensors, which must fill the rest without gap or overlap. Sizes are bounded before they are read, and what
read_header answers holds for the file, so that tensors can be taken by their offsets without another check.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deltaplane_server.adapters.files import LENGTH_BYTES, MAX_HEADER_BYTES, WEIGHTS_FILE
from deltaplane_server.adapters.strict_json import parse_object
from deltaplane_server.adapters.unservable import shown, unservable

MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 48

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file. start, stop: its bytes, counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """num_bytes: with the length before it. entries: in the order of their bytes, which fill the rest."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int


def read_header(read: Callable[[int], bytes], file_bytes: int) -> SafetensorsHeader:
    """Reads the header of a file of file_bytes. read: answers that many next bytes of the file.

    Errors: InvalidArgumentError.
    """
    return parse_header(read_header_bytes(read, file_bytes), file_bytes)


def read_header_bytes(read: Callable[[int], bytes], file_bytes: int) -> bytes:
    """The bytes of a header, with the length before it. Errors: InvalidArgumentError."""
    if file_bytes < LENGTH_BYTES:
        raise unservable(f"{WEIGHTS_FILE} has {file_bytes} bytes, too few for a header; copy it again")
    prefix = read(LENGTH_BYTES)
    return prefix + read(_header_length(prefix, file_bytes))


def parse_header(header: bytes, file_bytes: int) -> SafetensorsHeader:
    """What read_header_bytes answered. Errors: InvalidArgumentError."""
    return SafetensorsHeader(_parse(header[LENGTH_BYTES:], file_bytes - len(header)), len(header))


def _header_length(prefix: bytes, file_bytes: int) -> int:
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if not 2 <= length <= limit:
        if prefix.startswith(_PICKLE_STARTS):  # as that of a length that is possible may, such as 640
            raise unservable(
                f"{WEIGHTS_FILE} is a pickle (torch.save), which may run code and is not read: convert it by "
                "loading it with PEFT and saving it with save_pretrained"
            )
        raise unservable(
            f"{WEIGHTS_FILE} gives its header {length} bytes, where 2 to {limit} are possible: it is "
            "damaged, or no safetensors file"
        )
    return length


def _parse(header: bytes, body_bytes: int) -> tuple[TensorEntry, ...]:
    if not header.startswith(b"{"):
        raise unservable(f"the header of {WEIGHTS_FILE} does not start with '{{': it is damaged")
    document = parse_object(header, f"the header of {WEIGHTS_FILE}")
    document.pop("__metadata__", None)
    entries = [_entry(name, value) for name, value in document.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = 0
    for entry in entries:
        if entry.start != position:
            raise unservable(
                f"{WEIGHTS_FILE} has tensor {shown(entry.name)} at byte {entry.start}, where byte {position} "
                "is next: tensors overlap or leave a gap, so it is damaged"
            )
        position = entry.stop
    if position != body_bytes:
        raise unservable(
            f"{WEIGHTS_FILE} has {body_bytes} bytes of tensors and its header describes {position}: it is "
            "cut off or damaged; copy it again"
        )
    return tuple(entries)


def _entry(name: str, value: Any) -> TensorEntry:
    where = f"tensor {shown(name)} of {WEIGHTS_FILE}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise unservable(f"{where} is not described by dtype, shape and data_offsets: it is damaged")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise unservable(f"{where} is of type {shown(dtype)}; {', '.join(DTYPES)} are served")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise unservable(f"{where} has no valid shape: it is damaged")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise unservable(f"{where} has no valid data_offsets: it is damaged")
    start, stop = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != nbytes:
        raise unservable(f"{where} has {stop - start} bytes, its shape {shape} takes {nbytes}: it is damaged")
    return TensorEntry(name, DTYPES[dtype], tuple(shape), start, stop)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < MAX_SIZE for item in value)
