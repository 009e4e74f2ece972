"""What adapters are relative to: biases of the base, norms of its weights with a delta, and its tables."""

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deltaplane_server.models.decoder import Decoder

_CANCELLED = 0.01
"""Of the squares of W0 and of B A, below which what is left of both has lost too many digits."""

_EXACT_ROWS = 256
"""Rows of W0 + B A that are made at once where that is so."""


class DecoderWeights:
    """BaseWeights of a decoder, where its weights lie (see adapters.affine).

    B A is not formed. For a row w of W0 and the row b of B beside it,

        ||w + b A||^2 = ||w||^2 + 2 (w A^T) . b + b (A A^T) b^T

    which costs one product of `rank` rows with W0, in the decoder's own layout and dtype. The norms of W0 are
    computed once and kept. Rows in which W0 and B A nearly cancel are computed as they are, in float64.

    On a GPU all this runs on a stream of its own, one linear after the other and never two at once: a running
    step shares the device with one product of a few microseconds at a time.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._device = decoder.device
        self._ranges = _ranges(decoder)
        self._squares: dict[tuple[int, str], Tensor] = {}
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def bias(self, layer: int, linear: str, index: int) -> Tensor:
        begin, end = self._ranges[linear, index]
        bias = self._decoder.linear(layer, linear).bias
        if bias is None:
            return torch.zeros(end - begin)
        with self._lock, self._beside_steps():
            return bias[begin:end].float().cpu()

    def row_norms(self, layer: int, linear: str, index: int, a: Tensor, b: Tensor) -> Tensor:
        begin, end = self._ranges[linear, index]
        weight = self._decoder.linear(layer, linear)
        with self._lock, self._beside_steps():
            own = self._own_squares(layer, linear)[begin:end]
            a, b = a.to(self._device), b.to(self._device)
            delta = ((b @ (a @ a.T)) * b).sum(1)
            cross = (weight.product(a.to(self._decoder.dtype), begin, end).float().T * b).sum(1)
            squares = own + 2 * cross + delta
            norms = squares.sqrt()
            cancelled = (squares > _CANCELLED * (own + delta)).logical_not_().nonzero()[:, 0]
            if len(cancelled):
                _compute_exactly(norms, cancelled, weight.rows(begin, end), a, b)
            return norms.cpu()

    def equals_table(self, module: str, pieces: Iterable[Tensor]) -> bool:
        with self._lock, self._beside_steps():
            table, first = self._decoder.table(module), 0
            for piece in pieces:
                own = table[first : first + len(piece)].to(self._decoder.dtype)
                if not torch.equal(piece.to(self._device).to(own.dtype), own):
                    return False
                first += len(piece)
            return first == len(table)

    def _own_squares(self, layer: int, linear: str) -> Tensor:
        """||w||^2 of each row of the packed linear."""
        squares = self._squares.get((layer, linear))
        if squares is None:
            weight = self._decoder.linear(layer, linear)
            rows = weight.rows(0, weight.out_features)
            squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).square_()
            self._squares[layer, linear] = squares
        return squares

    def _beside_steps(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _ranges(decoder: Decoder) -> dict[tuple[str, int], tuple[int, int]]:
    """The rows of each slice in its packed linear."""
    ranges = {}
    for linear in decoder.config.adapter_layout().linears:
        begin = 0
        for index, part in enumerate(linear.slices):
            ranges[linear.name, index] = (begin, begin + part.out_features)
            begin += part.out_features
    return ranges


def _compute_exactly(norms: Tensor, which: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> None:
    """Writes ||weight + b a|| of the rows `which` into norms."""
    for rows in torch.split(which, _EXACT_ROWS):
        whole = torch.addmm(weight[rows].double(), b[rows].double(), a.double())
        norms[rows] = torch.linalg.vector_norm(whole, dim=1).to(norms.dtype)
