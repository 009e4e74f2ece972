"""Random adapters, mixes of them over a batch, and the LoRA op as the plainest loop."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, LinearSlice, PackedLinear
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, RankPageLayout, rank_pages

BASE = -1


def make_layout(
    num_layers: int = 2, hidden: int = 64, kv: int = 32, intermediate: int = 128
) -> AdapterLayout:
    """The packed linears of a Llama-like decoder."""
    return AdapterLayout(
        num_layers,
        (
            PackedLinear(
                "qkv_proj",
                hidden,
                (
                    LinearSlice("self_attn.q_proj", hidden),
                    LinearSlice("self_attn.k_proj", kv),
                    LinearSlice("self_attn.v_proj", kv),
                ),
            ),
            PackedLinear("o_proj", hidden, (LinearSlice("self_attn.o_proj", hidden),)),
            PackedLinear(
                "gate_up_proj",
                hidden,
                (LinearSlice("mlp.gate_proj", intermediate), LinearSlice("mlp.up_proj", intermediate)),
            ),
            PackedLinear("down_proj", intermediate, (LinearSlice("mlp.down_proj", hidden),)),
        ),
    )


@dataclass(frozen=True)
class Adapter:
    """A [rank, in] and B [rank, out_s], float32, of each (layer, linear, slice index) that it has."""

    layout: AdapterLayout
    matrices: dict[tuple[int, str, int], tuple[Tensor, Tensor]]

    @property
    def rank(self) -> int:
        return max(len(a) for a, _ in self.matrices.values())

    @property
    def ranks(self) -> list[list[int]]:
        return [
            [
                len(self.matrices[key][0]) if (key := (layer, linear.name, index)) in self.matrices else 0
                for linear in self.layout.linears
                for index in range(len(linear.slices))
            ]
            for layer in range(self.layout.num_layers)
        ]

    def host_pages(self, dtype: torch.dtype) -> Tensor:
        """The adapter as rank pages, [n, page_elements]. Rows above a rank hold NaN, which no op may read."""
        layout = RankPageLayout(self.layout)
        pages = torch.full((rank_pages(self.rank), layout.page_elements), torch.nan, dtype=dtype)
        for (layer, linear, index), (a, b) in self.matrices.items():
            for row in range(len(a)):
                page, place = divmod(row, RANK_PAGE_ROWS)
                layout.a(pages, layer, linear)[page, index, place] = a[row].to(dtype)
                layout.b(pages, layer, linear, index)[page, place] = b[row].to(dtype)
        return pages


def make_adapter(
    layout: AdapterLayout,
    rank: int | Sequence[int],
    *,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    modules: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """A random adapter whose values `dtype` holds exactly.

    rank: of all matrices, or several, which the matrices take in turn.
    layers, modules ("q_proj"): those it adapts; all by default.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = [rank] if isinstance(rank, int) else list(rank)
    matrices: dict[tuple[int, str, int], tuple[Tensor, Tensor]] = {}
    for layer in range(layout.num_layers) if layers is None else layers:
        for linear in layout.linears:
            for index, part in enumerate(linear.slices):
                if modules is not None and part.module.rpartition(".")[2] not in modules:
                    continue
                own = ranks[len(matrices) % len(ranks)]
                a = torch.randn(own, linear.in_features, generator=generator) / linear.in_features**0.5
                b = torch.randn(own, part.out_features, generator=generator) / own**0.5
                matrices[layer, linear.name, index] = (a.to(dtype).float(), b.to(dtype).float())
    return Adapter(layout, matrices)


def add_delta_by_loop(
    adapters: Sequence[Adapter],
    segments: Sequence[tuple[int, int]],
    layer: int,
    linear: PackedLinear,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """y + (x A^T) B in float64, row by row and slice by slice. adapters: by slot."""
    result = y.double()
    row = 0
    for slot, num_tokens in segments:
        for _ in range(num_tokens):
            column = 0
            for index, part in enumerate(linear.slices):
                if slot != BASE and (layer, linear.name, index) in adapters[slot].matrices:
                    a, b = adapters[slot].matrices[layer, linear.name, index]
                    delta = (x[row].double() @ a.double().T) @ b.double()
                    result[row, column : column + part.out_features] += delta
                column += part.out_features
            row += 1
    return result


MIXES = ("distinct", "uniform", "zipf", "identical", "skewed", "all_base")


def make_mix(mix: str, batch: int, num_adapters: int, seed: int = 0) -> list[tuple[int, int]]:
    """One-token segments (slot, 1) of a batch; all mixes but "identical" have rows of the base model."""
    rng = random.Random(seed)
    choices = [BASE, *range(num_adapters)]
    match mix:
        case "distinct":
            slots = [choices[row % len(choices)] for row in range(batch)]
        case "uniform":
            slots = rng.choices(choices, k=batch)
        case "zipf":
            slots = rng.choices(choices, weights=[1 / (place + 1) for place in range(len(choices))], k=batch)
        case "identical":
            slots = [num_adapters - 1] * batch
        case "skewed":
            slots = [0 if row < batch * 0.9 else rng.choice(choices) for row in range(batch)]
        case "all_base":
            slots = [BASE] * batch
        case _:
            raise ValueError(mix)
    return [(slot, 1) for slot in slots]
