"""Fills tensors with parts of files: many readers at once, and copies to a GPU at the speed of its bus.

    file --preadv, several readers--> pinned buffer --a sender, copy stream--> the tensor, cast on its device

There are two pinned buffers for each reader, which go round: while one is copied, the reader fills another.
The bytes are read straight into them, without the page faults of a mapped file, and no second copy of a
tensor arises. Readers only read: one thread asks for all copies. ServerlessLLM (Fu et al., 2024) loads
checkpoints on the same lines.
"""

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.cuda_copies import copy_to_device
from deltaplane_server.pinned_memory import PinnedMemory

BUFFER_BYTES = 4 << 20
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
        self._wanted: SimpleQueue[_Piece | None] = SimpleQueue()
        self._empty: SimpleQueue[_Buffer] = SimpleQueue()
        self._full: SimpleQueue[tuple[_Piece, _Buffer] | None] = SimpleQueue()
        for part in torch.split(self._memory.bytes, buffer_bytes):
            self._empty.put(_Buffer(part, self._stream))
        self._error: Exception | None = None
        self._files: dict[Path, int] = {}
        self._readers = [
            Thread(target=self._read, name=f"weights-reader-{i}", daemon=True) for i in range(num_readers)
        ]
        self._sender = Thread(target=self._send, name="weights-sender", daemon=True)
        for thread in (*self._readers, self._sender):
            thread.start()

    def fill(self, target: Tensor, source: TensorBytes) -> None:
        """Begins to fill `target`, contiguous and of the source's shape; returns before it is filled.

        Errors: InvalidArgumentError where the file cannot be opened.
        """
        if self._stream is not None:  # what has used the target's memory before may still run
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        file = self._open(source.file)
        itemsize = source.dtype.itemsize
        length = self._buffer_bytes // itemsize
        for begin in range(0, target.numel(), length):
            end = min(begin + length, target.numel())
            self._wanted.put(_Piece(source, file, target, begin, end))
        self.num_bytes += target.numel() * itemsize

    def finish(self) -> None:
        """Returns when all targets are filled, and lets go of threads, buffers and files.

        Errors: InvalidArgumentError where a file cannot be read, KernelError where a GPU refuses a copy; then
        the targets are worth nothing.
        """
        for _ in self._readers:
            self._wanted.put(None)
        for reader in self._readers:
            reader.join()
        self._full.put(None)
        self._sender.join()
        if self._stream is not None:
            self._stream.synchronize()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._empty = SimpleQueue()
        self._memory = None
        if self._error is not None:
            raise self._error

    def _open(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from error
        return self._files[path]

    def _read(self) -> None:
        """A reader. After an error, of whichever thread, pieces are let go as they are."""
        for piece in iter(self._wanted.get, None):
            buffer = self._empty.get()
            try:
                if self._error is None:
                    piece.read_into(buffer.view[: piece.num_bytes])
            except Exception as error:
                self._error = error
            self._full.put((piece, buffer))

    def _send(self) -> None:
        """The sender. Half of the buffers may be on their way; the other half is the readers'."""
        on_their_way: deque[_Buffer] = deque()
        for piece, buffer in iter(self._full.get, None):
            on_their_way.append(buffer)
            try:
                if self._error is None:
                    buffer.send(piece)
                if len(on_their_way) > len(self._readers):
                    on_their_way[0].wait()
            except Exception as error:
                self._error = error
            if len(on_their_way) > len(self._readers):
                self._empty.put(on_their_way.popleft())
            self.seconds = time.monotonic() - self._begun


class _Piece(NamedTuple):
    """Elements begin to end of a target, and the bytes of the file that belong there."""

    source: TensorBytes
    file: int
    target: Tensor
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * self.source.dtype.itemsize

    def read_into(self, view: memoryview) -> None:
        path, filled = self.source.file, 0
        offset = self.source.offset + self.begin * self.source.dtype.itemsize
        while filled < len(view):
            try:
                count = os.preadv(self.file, [view[filled:]], offset + filled)
            except OSError as error:
                raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from error
            if not count:
                raise InvalidArgumentError(
                    f"{path} cannot be read: it ends {len(view) - filled} bytes early; fetch the model again"
                )
            filled += count


class _Buffer:
    """Pinned memory, the stream on which it is copied to a GPU, and when its last copy is done."""

    def __init__(self, memory: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._bytes = memory
        self._address = memory.data_ptr()
        self.view: memoryview = self._bytes.numpy().data
        self._stream = stream
        self._sent = torch.cuda.Event(blocking=True) if stream is not None else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, piece: _Piece) -> None:
        """Copies what was read to its target. A GPU casts itself: the bus carries the file's own bytes."""
        target = piece.target
        if self._stream is None or self._sent is None:
            self._cast(piece)
            return
        if piece.source.dtype == target.dtype:
            address = target.data_ptr() + piece.begin * target.element_size()
            copy_to_device(address, self._address, piece.num_bytes, self._stream)
        else:
            with torch.cuda.stream(self._stream):
                self._cast(piece)
        self._sent.record(self._stream)

    def _cast(self, piece: _Piece) -> None:
        data = self._bytes[: piece.num_bytes].view(piece.source.dtype)
        data = data.to(piece.target.device, non_blocking=True)
        piece.target.view(-1)[piece.begin : piece.end].copy_(data, non_blocking=True)
