"""Which linears of a decoder take a LoRA delta, and how they are packed.

Linears that read the same input are one packed linear: one base product, one shrink, one expand. Its
slices keep their own A and B.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """One linear inside a packed one. module: its path inside a layer, such as "self_attn.q_proj"."""

    module: str
    out_features: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Linears side by side: y[T, sum(out)] = x[T, in] @ W[sum(out), in]^T.

    name: "qkv_proj", "o_proj", "gate_up_proj" or "down_proj".
    """

    name: str
    in_features: int
    slices: tuple[LinearSlice, ...]

    @property
    def out_features(self) -> int:
        return sum(s.out_features for s in self.slices)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The adaptable linears of a decoder: the same ones in each of num_layers layers."""

    num_layers: int
    linears: tuple[PackedLinear, ...]
