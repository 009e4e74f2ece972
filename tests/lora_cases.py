"""Random adapters, mixes of them over a batch, and the LoRA op as the plainest loop."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, LinearSlice, PackedLinear
from deltaplane_kernels.lora_segments import Blend, Slots
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, RankPageLayout, SliceRows, adapter_rank_pages

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


Key = tuple[int, str, int]
"""Layer, packed linear, and index of the slice."""


@dataclass(frozen=True)
class Adapter:
    """A [rank, in] and B [rank, out_s], float32, of each (layer, linear, slice index) that it has, and
    gains and biases [out_s] of those that have such."""

    layout: AdapterLayout
    matrices: dict[Key, tuple[Tensor, Tensor]]
    gains: dict[Key, Tensor] = field(default_factory=dict)
    biases: dict[Key, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> list[list[SliceRows]]:
        return [
            [
                SliceRows(
                    rank=len(self.matrices[key][0]) if key in self.matrices else 0,
                    has_gain=key in self.gains,
                    has_bias=key in self.biases,
                )
                for linear in self.layout.linears
                for index in range(len(linear.slices))
                for key in [(layer, linear.name, index)]
            ]
            for layer in range(self.layout.num_layers)
        ]

    def host_pages(self, dtype: torch.dtype, beyond: float = torch.nan) -> Tensor:
        """The adapter as rank pages, [n, page_elements]. Rows that it lacks are `beyond`, which no op may
        read but in a blend, where they must be zeros."""
        layout = RankPageLayout(self.layout)
        pages = torch.full((adapter_rank_pages(self.rows), layout.page_elements), beyond, dtype=dtype)
        for key in self.matrices.keys() | self.gains.keys() | self.biases.keys():
            layer, linear, index = key
            a, b = self.matrices.get(key, ((), ()))
            rows = [*b, *(terms[key] for terms in (self.gains, self.biases) if key in terms)]
            for row, values in enumerate(rows):
                page, place = divmod(row, RANK_PAGE_ROWS)
                layout.a(pages, layer, linear)[page, index, place] = a[row].to(dtype) if row < len(a) else 0
                layout.b(pages, layer, linear, index)[page, place] = values.to(dtype)
        return pages


def make_adapter(
    layout: AdapterLayout,
    rank: int | Sequence[int],
    *,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    modules: Sequence[str] | None = None,
    gains: Sequence[str] = (),
    biases: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """A random adapter whose values `dtype` holds exactly.

    rank: of all matrices, or several, which the matrices take in turn.
    layers, modules ("q_proj"): those it adapts; all by default.
    gains, biases: modules that have such too, in the same layers.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = [rank] if isinstance(rank, int) else list(rank)
    adapter = Adapter(layout, {})

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for layer in range(layout.num_layers) if layers is None else layers:
        for linear in layout.linears:
            for index, part in enumerate(linear.slices):
                key, module = (layer, linear.name, index), part.module.rpartition(".")[2]
                if modules is None or module in modules:
                    own = ranks[len(adapter.matrices) % len(ranks)]
                    a = random(own, linear.in_features) / linear.in_features**0.5
                    b = random(own, part.out_features) / own**0.5
                    adapter.matrices[key] = (a.to(dtype).float(), b.to(dtype).float())
                if module in gains:
                    adapter.gains[key] = (0.3 * random(part.out_features)).to(dtype).float()
                if module in biases:
                    adapter.biases[key] = random(part.out_features).to(dtype).float()
    return adapter


def add_delta_by_loop(
    adapters: Sequence[Adapter],
    segments: Sequence[tuple[Slots, int]],
    layer: int,
    linear: PackedLinear,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """y + g y + d + the weighted sum of (x A^T) B in float64, adapter by adapter and slice by slice.

    adapters: by slot.
    """
    result = y.double()
    owners = [slots for slots, count in segments for _ in range(count)]
    for slots in set(owners):
        rows = [row for row, owner in enumerate(owners) if owner == slots]
        column = 0
        for index, part in enumerate(linear.slices):
            columns = slice(column, column + part.out_features)
            column += part.out_features
            before = result[rows, columns]
            for slot, weight in members_of(slots):
                key = (layer, linear.name, index)
                if key in adapters[slot].matrices:
                    a, b = (matrix.double() for matrix in adapters[slot].matrices[key])
                    result[rows, columns] += weight * ((x[rows].double() @ a.T) @ b)
                if key in adapters[slot].gains:
                    result[rows, columns] += adapters[slot].gains[key].double() * before
                if key in adapters[slot].biases:
                    result[rows, columns] += adapters[slot].biases[key].double()
    return result


def members_of(slots: Slots) -> Blend:
    """The adapters that a segment's rows have, each with its weight; none for the base."""
    if isinstance(slots, int):
        return () if slots == BASE else ((slots, 1.0),)
    return slots


def is_touched(adapters: Sequence[Adapter], slots: Slots, key: Key) -> bool:
    """Whether rows of these slots may change in that slice."""
    return any(
        key in terms
        for slot, _ in members_of(slots)
        for terms in (adapters[slot].matrices, adapters[slot].gains, adapters[slot].biases)
    )


MIXES = ("distinct", "uniform", "zipf", "identical", "skewed", "all_base")


def make_mix(
    mix: str, batch: int, num_adapters: int, seed: int = 0, blends: Sequence[Blend] = ()
) -> list[tuple[Slots, int]]:
    """One-token segments (slots, 1) of a batch; all mixes but "identical" have rows of the base model."""
    rng = random.Random(seed)
    choices: list[Slots] = [BASE, *range(num_adapters), *blends]
    match mix:
        case "distinct":
            slots = [choices[row % len(choices)] for row in range(batch)]
        case "uniform":
            slots = rng.choices(choices, k=batch)
        case "zipf":
            slots = rng.choices(choices, weights=[1 / (place + 1) for place in range(len(choices))], k=batch)
        case "identical":
            slots = [choices[-1]] * batch
        case "skewed":
            slots = [0 if row < batch * 0.9 else rng.choice(choices) for row in range(batch)]
        case "all_base":
            slots = [BASE] * batch
        case _:
            raise ValueError(mix)
    return [(one, 1) for one in slots]
