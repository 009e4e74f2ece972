"""Pools on a GPU with adapters of all kinds in them, and how near the plainest loop their ops come.

Tolerances: float32 2e-5, as on a CPU, where TF32 would be off by 1e-3; float16 2e-3 and bfloat16 2e-2, which
the rounding of y alone may cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.lora_segments import Blend
from lora_cases import Adapter, make_adapter

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCES)
MAX_TOKENS = 4096
EPS = 1e-5

MEMBERS = range(4)
"""The adapters of make_adapters that take part in blends."""

BLENDS: list[Blend] = [
    ((0, 0.7), (2, -1.3)),
    ((2, 1.5),),
    ((3, 0.25), (1, 2.0), (0, -0.5)),
    ((1, 1.0), (3, 1.0)),
    ((3, 0.7), (2, 0.0), (1, -1.0), (0, 0.5)),
]
MAX_BLENDS = 3


def make_adapters(layout: AdapterLayout, dtype: torch.dtype) -> list[Adapter]:
    """Plain ones, then some with gains and biases: beside rank rows, across the end of a page, alone."""
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    last = [layout.num_layers - 1]
    return [
        make_adapter(layout, 8, seed=1, dtype=dtype),
        make_adapter(layout, 16, seed=2, modules=["q_proj", "v_proj"], dtype=dtype),
        make_adapter(layout, [1, 4, 12, 3], seed=3, dtype=dtype),
        make_adapter(layout, 17, seed=4, layers=last, dtype=dtype),
        make_adapter(layout, 2, seed=5, modules=["down_proj"], dtype=dtype),
        make_adapter(layout, 40, seed=6, modules=["k_proj", "up_proj"], dtype=dtype),
        make_adapter(layout, [8, 3], seed=7, gains=[*attention, *mlp], dtype=dtype),
        make_adapter(layout, [15, 7], seed=8, modules=attention, gains=mlp, biases=attention, dtype=dtype),
        make_adapter(layout, 1, seed=9, modules=[], layers=last, biases=["k_proj", "o_proj"], dtype=dtype),
        make_adapter(layout, 23, seed=10, gains=attention, biases=["q_proj", *mlp], dtype=dtype),
    ]


def filled_pool(
    layout: AdapterLayout, adapters: Sequence[Adapter], dtype: torch.dtype, members: Sequence[int] = ()
) -> RankPagePool:
    """A pool with adapter i in slot i, in pages that run backwards and are never neighbours.

    members: those that take part in blends. The others have NaN in the rows that they lack.
    """
    hosts = [
        adapter.host_pages(dtype, beyond=0.0 if slot in members else torch.nan)
        for slot, adapter in enumerate(adapters)
    ]
    free = list(range(2 * sum(len(host) for host in hosts)))
    pool = RankPagePool(layout, len(free), len(adapters), dtype, "cuda", MAX_TOKENS, MAX_BLENDS)
    pool.pages.fill_(torch.nan)
    torch.cuda.synchronize()
    for slot, (adapter, host) in enumerate(zip(adapters, hosts, strict=True)):
        pages = [free.pop() for _ in range(2 * len(host))][::2]
        pool.load(slot, pages, host.pin_memory(), adapter.rows)
    pool.check_integrity()
    return pool


@dataclass(frozen=True)
class CopiedProduct:
    """Stands for a base product that cannot tell when its x is there."""

    y: Tensor
    result: Tensor

    def can_announce(self, num_rows: int) -> bool:
        return False

    def __call__(self, x: Tensor, *, x_is_there: Tensor | None = None) -> Tensor:
        assert x_is_there is None
        return self.y.copy_(self.result)


def random_rows(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def norm_of(residual: Tensor, weight: Tensor) -> Tensor:
    """In float64, rounded where the op rounds. weight: [H] or [T, H]."""
    wide = residual.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()).to(residual.dtype) * weight
