"""Filling tensors with parts of files: several readers, tensors smaller and larger than a buffer."""

import os
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.models import upload as upload_module
from deltaplane_server.models.upload import TensorBytes, Upload

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (0, 1, 7, 64, 1000, 1001, 4096)


def write_tensors(path: Path, tensors: list[Tensor], begin: int = 3) -> list[TensorBytes]:
    """The tensors one after the other, from a place that divides by nothing."""
    content = bytearray(b"x" * begin)
    places = []
    for tensor in tensors:
        places.append(TensorBytes(path, len(content), tuple(tensor.shape), tensor.dtype))
        content += tensor.view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)
    return places


@pytest.mark.parametrize("buffer_bytes", [4, 100, 4096, 1 << 20])
@pytest.mark.parametrize("num_readers", [1, 5])
def test_every_byte_comes_to_its_place(tmp_path: Path, num_readers: int, buffer_bytes: int) -> None:
    tensors = [[torch.randn(size).to(dtype) for size in SIZES] for dtype in DTYPES]
    places = [write_tensors(tmp_path / str(i), shard) for i, shard in enumerate(tensors)]
    targets = [[torch.full_like(tensor, torch.nan) for tensor in shard] for shard in tensors]

    upload = Upload(CPU, num_readers, buffer_bytes)
    for shard, shard_places in zip(targets, places, strict=True):
        for target, place in zip(shard, shard_places, strict=True):
            upload.fill(target, place)
    upload.finish()

    assert all(map(torch.equal, chain(*targets), chain(*tensors)))
    assert upload.num_bytes == sum(SIZES) * (4 + 2 + 2)
    assert upload.seconds > 0


@pytest.mark.parametrize("served", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_numbers_are_cast_as_torch_casts_them(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype
) -> None:
    tensor = torch.randn(30, 20).to(stored)
    [place] = write_tensors(tmp_path / "file", [tensor])
    target = torch.empty(30, 20, dtype=served)
    upload = Upload(CPU, num_readers=2, buffer_bytes=256)
    upload.fill(target, place)
    upload.finish()
    assert torch.equal(target, tensor.to(served))


def test_slices_of_one_tensor_are_filled_in_place(tmp_path: Path) -> None:
    parts = [torch.randn(3, 8), torch.randn(2, 8), torch.randn(4, 8)]
    rows = torch.zeros(11, 8)
    upload = Upload(CPU, num_readers=3, buffer_bytes=64)
    for place, target in zip(
        write_tensors(tmp_path / "file", parts), torch.split(rows[1:10], [3, 2, 4]), strict=True
    ):
        upload.fill(target, place)
    upload.finish()
    assert torch.equal(rows, torch.cat((torch.zeros(1, 8), *parts, torch.zeros(1, 8))))


def test_a_short_file_is_named_with_what_it_lacks_and_nothing_stays_open(tmp_path: Path) -> None:
    tensor = torch.randn(100)
    [place] = write_tensors(tmp_path / "short", [tensor])
    os.truncate(tmp_path / "short", 3 + 390)
    open_before = len(os.listdir("/proc/self/fd"))
    upload = Upload(CPU, num_readers=2, buffer_bytes=40)
    upload.fill(torch.empty(100), place)
    with pytest.raises(
        InvalidArgumentError, match=r"short cannot be read: it ends 10 bytes early; fetch"
    ) as caught:
        upload.finish()
    assert "\n" not in caught.value.message
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize("num_readers", [1, 3])
def test_a_copy_that_fails_ends_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_readers: int
) -> None:
    """With more pieces to come than there are buffers: no reader waits for one for ever."""
    place, _ = write_tensors(tmp_path / "file", [torch.randn(1000), torch.randn(1)])
    sent: list[object] = []

    def send(buffer: object, piece: object) -> None:
        sent.append(piece)
        if len(sent) == 5:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(upload_module._Buffer, "send", send)
    upload = Upload(CPU, num_readers, buffer_bytes=40)
    upload.fill(torch.empty(1000), place)
    with pytest.raises(RuntimeError, match="the device is gone"):
        upload.finish()
    assert len(sent) == 5


def test_a_missing_file_is_named_at_once(tmp_path: Path) -> None:
    upload = Upload(CPU, num_readers=1)
    with pytest.raises(InvalidArgumentError, match="gone cannot be read: No such file"):
        upload.fill(torch.empty(1), TensorBytes(tmp_path / "gone", 0, (1,), torch.float32))
    upload.finish()


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    upload = Upload(CPU, num_readers=1)
    upload.fill(torch.empty(1), TensorBytes(tmp_path, 0, (1,), torch.float32))
    with pytest.raises(InvalidArgumentError, match="cannot be read: Is a directory"):
        upload.finish()
