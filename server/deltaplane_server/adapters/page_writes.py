"""Writes many parts of rank pages by few calls.

Each call of torch lets go of the GIL and waits to get it back. Threads that each make many small calls wait
for one another most of the time, and make the thread wait that runs steps. Hence views are made beforehand,
by one thread at a time, and a list of them is written by one call.
"""

from collections import defaultdict

import torch
from torch import Tensor

from deltaplane_server.adapters.tensor_values import has_finite_sum, scaled


class PageWrites:
    """What is written into one part of an adapter's rank pages, [n, elements].

    is_filled: whether that leaves no element as it was; where not, the others become zeros.
    """

    def __init__(self, part: Tensor, *, is_filled: bool) -> None:
        self._part = part
        self._is_filled = is_filled
        self._alike: dict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        self._others: list[tuple[Tensor, Tensor, float | Tensor]] = []

    def add(self, target: Tensor, source: Tensor, scale: "float | Tensor" = 1.0) -> None:
        """target = source * scale, computed in float32 and rounded once.

        target: a view of the part. scale: one number, or broadcast.
        """
        if isinstance(scale, float) and source.dtype == target.dtype:
            targets, sources = self._alike[scale]
            targets.append(target)
            sources.append(source)
        else:
            self._others.append((target, source, scale))

    def write(self) -> None:
        """A number multiplies 16-bit tensors in float32 on a CPU. It does so before B is transposed: what is
        written to the pages is not gone over again."""
        if not self._is_filled:
            self._part.zero_()
        for scale, (targets, sources) in self._alike.items():
            products = sources if scale == 1.0 else torch._foreach_mul(sources, scale)
            torch._foreach_copy_(targets, products)
        for target, source, factor in self._others:
            target.copy_(scaled(source, factor, target.dtype))

    def has_finite_sums(self) -> bool:
        """Whether the sum of each page of the part is finite, and so all values that were written."""
        return all(has_finite_sum(page) for page in self._part)
