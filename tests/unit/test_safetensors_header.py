"""The strict reader of safetensors headers: what safetensors writes, and damage of all kinds."""

import io
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.adapters.files import MAX_HEADER_BYTES
from deltaplane_server.adapters.safetensors_header import SafetensorsHeader, read_header


def read(data: bytes, file_bytes: int | None = None) -> SafetensorsHeader:
    return read_header(io.BytesIO(data).read, len(data) if file_bytes is None else file_bytes)


def refusal(data: bytes, file_bytes: int | None = None) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        read(data, file_bytes)
    assert [violation.field for violation in caught.value.violations] == ["source"]
    assert len(caught.value.message) < 1000
    return caught.value.message


def with_header(header: Any, body_bytes: int = 0) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(body_bytes)


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_what_safetensors_writes_is_read() -> None:
    tensors = {
        "b": torch.ones(3, 2, dtype=torch.bfloat16),
        "a": torch.ones(4, dtype=torch.float32),
        "c": torch.ones(1, 5, dtype=torch.float16),
    }
    data = save(tensors, metadata={"format": "pt"})
    header = read(data)
    assert {one.name: (one.dtype, one.shape) for one in header.entries} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert header.num_bytes + sum(one.nbytes for one in header.entries) == len(data)
    starts = [one.start for one in header.entries]
    assert starts == sorted(starts)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_a_length_that_looks_like_the_start_of_a_pickle_is_read(length: int) -> None:
    data = with_header(json.dumps({"a": entry()}).encode().ljust(length), 16)
    assert data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    assert read(data).num_bytes == 8 + length


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "has 0 bytes, too few"),
        (b"\x08\x00\x00", "has 3 bytes, too few"),
        (
            (2 << 30).to_bytes(8, "little") + b"{}",
            "gives its header 2147483648 bytes, where 2 to 2 are possible",
        ),
        (b"\xff" * 8 + b"{}", "gives its header 18446744073709551615 bytes"),
        (bytes(8) + b"{}", "gives its header 0 bytes"),
        (b"PK\x03\x04" + bytes(100), "is a pickle"),
        (b"\x80\x02" + bytes(100), "is a pickle"),
        (with_header(b" {}"), "does not start with '{'"),
        (with_header(b"{]"), "is not valid JSON"),
        (with_header(b'{"a"\xff: 1}'), "is not valid JSON"),
        (with_header(b'{"a":' + b"[" * 100_000), "is not valid JSON"),
        (with_header(b'{"a": {}, "a": {}}'), "key 'a' is there twice"),
        (with_header(b'{"a": NaN}'), "NaN is not a JSON number"),
        (with_header({"a": []}), "not described by dtype, shape and data_offsets"),
        (with_header({"a": {"dtype": "F32"}}), "not described by dtype, shape and data_offsets"),
        (with_header({"a": entry(extra=1)}, 16), "not described by dtype, shape and data_offsets"),
        (with_header({"a": entry(dtype="I64")}, 16), "of type 'I64'; F32, F16, BF16 are served"),
        (with_header({"a": entry(dtype="F64")}, 16), "of type 'F64'"),
        (with_header({"a": entry(dtype=7)}, 16), "of type 7"),
        (with_header({"a": entry(shape=4)}, 16), "no valid shape"),
        (with_header({"a": entry(shape=[2, -2])}, 16), "no valid shape"),
        (with_header({"a": entry(shape=[2.0, 2])}, 16), "no valid shape"),
        (with_header({"a": entry(shape=[True, 4])}, 16), "no valid shape"),
        (with_header({"a": entry(shape=[2**60, 2**60])}, 16), "no valid shape"),
        (with_header({"a": entry(shape=[1] * 20, offsets=[0, 4])}, 4), "no valid shape"),
        (with_header({"a": entry(offsets=[0])}, 16), "no valid data_offsets"),
        (with_header({"a": entry(offsets=[-16, 0])}, 16), "no valid data_offsets"),
        (with_header({"a": entry(offsets=[16, 0])}, 16), "has -16 bytes, its shape [2, 2] takes 16"),
        (with_header({"a": entry(offsets=[0, 15])}, 16), "has 15 bytes, its shape [2, 2] takes 16"),
        (with_header({"a": entry(), "b": entry()}, 16), "overlap or leave a gap"),
        (with_header({"a": entry(), "b": entry(offsets=[8, 24])}, 24), "overlap or leave a gap"),
        (with_header({"a": entry(), "b": entry(offsets=[20, 36])}, 36), "overlap or leave a gap"),
        (with_header({"a": entry(offsets=[4, 20])}, 20), "overlap or leave a gap"),
        (with_header({"a": entry()}, 15), "has 15 bytes of tensors and its header describes 16"),
        (with_header({"a": entry()}, 17), "has 17 bytes of tensors and its header describes 16"),
        (with_header({"a" * 500_000: entry(dtype="x" * 500_000)}, 16), "aaa…"),
    ],
)
def test_damage_is_refused(data: bytes, complaint: str) -> None:
    assert complaint in refusal(data)


def test_a_header_over_the_limit_is_refused_before_it_is_read() -> None:
    prefix = (MAX_HEADER_BYTES + 1).to_bytes(8, "little")
    assert f"where 2 to {MAX_HEADER_BYTES} are possible" in refusal(prefix, 1 << 40)


GOOD = save({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.float16)}, metadata={"format": "pt"})


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_leaves_a_consistent_file(place: int, flip: int) -> None:
    data = bytearray(GOOD)
    data[place] ^= flip
    check_read_or_refused(bytes(data))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_consistent(data: bytes) -> None:
    check_read_or_refused(data)
    check_read_or_refused(with_header(b"{" + data))


@given(st.integers(0, len(GOOD) - 1))
def test_a_file_that_was_cut_off_is_refused(length: int) -> None:
    refusal(GOOD[:length])


def check_read_or_refused(data: bytes) -> None:
    try:
        header = read(data)
    except InvalidArgumentError:
        return
    position = 0
    for one in header.entries:
        assert one.start == position
        position = one.stop
    assert header.num_bytes + position == len(data)
