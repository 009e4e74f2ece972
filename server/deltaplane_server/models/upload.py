"""Fills tensors with parts of files: many readers at once, and copies to a GPU at the speed of its bus.

    file --preadv, several threads--> pinned buffer --copy stream--> the tensor, cast on its device

There are two pinned buffers for each reader, which go round: while one is copied, the reader fills another.
The bytes are read straight into them, without the page faults of a mapped file, and no second copy of a
tensor arises. ServerlessLLM (Fu et al., 2024) loads checkpoints on the same lines.
"""

import os
import queue
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.pinned_memory import PinnedMemory

BUFFER_BYTES = 8 << 20
"""Long enough for the full speed of the bus, short enough that what is read stays in a core's cache."""

MAX_READERS = 8
"""One reads some 8 GB/s out of the page cache; a PCIe 5 bus takes 55."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor in a file: where its bytes begin, and what they are."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Upload:
    """Fills tensors on one device, until finish(). Used by one thread.

    num_bytes: that have been asked for. seconds: until the last of them was on its way.
    """

    def __init__(
        self, device: torch.device, num_readers: int | None = None, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        """num_readers: by default one for each core, up to MAX_READERS."""
        num_readers = num_readers or min(MAX_READERS, len(os.sched_getaffinity(0)))
        self.num_bytes = 0
        self.seconds = 0.0
        self._begun = time.monotonic()
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._memory: PinnedMemory | None = PinnedMemory(
            2 * num_readers * buffer_bytes, pin=device.type == "cuda"
        )
        self._buffers: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for part in torch.split(self._memory.bytes, buffer_bytes):
            self._buffers.put(_Buffer(part, self._stream))
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="weights-reader")
        self._pieces: list[Future[None]] = []
        self._files: dict[Path, int] = {}

    def fill(self, target: Tensor, source: TensorBytes) -> None:
        """Begins to fill `target`, contiguous and of the source's shape; returns before it is filled.

        Errors: InvalidArgumentError where the file cannot be opened.
        """
        if self._stream is not None:  # what has used the target's memory before may still run
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        file = self._open(source.file)
        itemsize = source.dtype.itemsize
        offset = source.offset
        for part in torch.split(target.view(-1), self._buffer_bytes // itemsize):
            piece = _Piece(source.file, file, offset, source.dtype, part)
            self._pieces.append(self._readers.submit(self._move, piece))
            offset += piece.num_bytes
        self.num_bytes += offset - source.offset

    def finish(self) -> None:
        """Returns when all targets are filled, and lets go of threads, buffers and files.

        Errors: InvalidArgumentError where a file cannot be read; then the targets are worth nothing.
        """
        try:
            done, _ = wait(self._pieces, return_when=FIRST_EXCEPTION)
            for piece in done:
                piece.result()
        finally:
            self._readers.shutdown(cancel_futures=True)
            if self._stream is not None:
                self._stream.synchronize()
            for file in self._files.values():
                os.close(file)
            self._files.clear()
            self._pieces.clear()
            self._buffers = queue.SimpleQueue()
            self._memory = None

    def _open(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from error
        return self._files[path]

    def _move(self, piece: "_Piece") -> None:
        """On a reader's thread. The buffers go round: the first in the queue has been on its way longest."""
        buffer = self._buffers.get()
        try:
            buffer.wait()
            piece.read_into(buffer.view[: piece.num_bytes])
            buffer.send(piece)
            self.seconds = time.monotonic() - self._begun
        finally:
            self._buffers.put(buffer)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a target, flat, and the bytes of the file that belong there."""

    path: Path
    file: int
    offset: int
    dtype: torch.dtype
    target: Tensor

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize

    def read_into(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            try:
                count = os.preadv(self.file, [view[filled:]], self.offset + filled)
            except OSError as error:
                raise InvalidArgumentError(f"{self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise InvalidArgumentError(
                    f"{self.path} cannot be read: it ends {len(view) - filled} bytes early; "
                    "fetch the model again"
                )
            filled += count


class _Buffer:
    """Pinned memory, the stream on which it is copied to a GPU, and when its last copy is done."""

    def __init__(self, memory: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._bytes = memory
        self.view: memoryview = self._bytes.numpy().data
        self._stream = stream
        self._sent = torch.cuda.Event(blocking=True) if stream is not None else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, piece: _Piece) -> None:
        """Copies what was read to its target. A GPU casts itself: the bus carries the file's own bytes."""
        data = self._bytes[: piece.num_bytes].view(piece.dtype)
        if self._stream is None or self._sent is None:
            piece.target.copy_(data)
            return
        with torch.cuda.stream(self._stream):
            if data.dtype != piece.target.dtype:
                data = data.to(piece.target.device, non_blocking=True)
            piece.target.copy_(data, non_blocking=True)
            self._sent.record(self._stream)
