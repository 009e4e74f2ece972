"""What of a decoder an adapter may change: the linears that take a LoRA delta, and the rest.

Linears that read the same input are one packed linear: one base product, one shrink, one expand. Its
slices keep their own A and B.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """One linear inside a packed one. module: its path inside a layer, such as "self_attn.q_proj"."""

    module: str
    out_features: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Linears side by side: y[T, sum(out)] = x[T, in] @ W[sum(out), in]^T + b[sum(out)].

    name: "qkv_proj", "o_proj", "gate_up_proj" or "down_proj".
    has_bias: whether the base has b.
    """

    name: str
    in_features: int
    slices: tuple[LinearSlice, ...]
    has_bias: bool = False

    @property
    def out_features(self) -> int:
        return sum(s.out_features for s in self.slices)


@dataclass(frozen=True, slots=True)
class OutsideLayers:
    """What an adapter may change of a decoder beside the linears of its layers.

    vocab_size, hidden_size: of the embedding table and of the head, both [vocab_size, hidden_size].
    is_tied: whether the base ties them, so that they are one.
    norms: the size of each norm by its path, such as "layers.0.input_layernorm", or "norm" for the last one.
    """

    vocab_size: int
    hidden_size: int
    norms: Mapping[str, int]
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """What an adapter may change of a decoder.

    linears: the same ones in each of num_layers layers.
    outside: what else there is; None where nothing else may be changed.
    """

    num_layers: int
    linears: tuple[PackedLinear, ...]
    outside: OutsideLayers | None = None
