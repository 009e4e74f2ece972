"""What an adapter changes of a linear beside A and B: gains and biases, relative to the base's own weights.

A linear computes y = W0 x + b0, and with LoRA of scale s, a bias b_B on lora_B, magnitudes m of DoRA (Liu et
al., 2024) and a trained bias b1

    f * (W0 x + s (B A x + b_B)) + b1        f = m / ||W0 + s B A||, by each output's row; 1 without DoRA

which is y + g * y + d + f s B A x, where

    g = f - 1        d = (b1 - b0) - g * b0 + s b_B        b1 = b0 where it was not trained

since DoRA and b_B do not come together. PEFT computes the norms in each forward pass; they do not depend on
x, and are computed once here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltaplane_server.adapters.lora_matrices import AdaptedSlice, LoraMatrices
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.unservable import shown, unservable


class BaseWeights(Protocol):
    """The frozen weights of a base model. Any thread but the engine's may call; steps go on meanwhile.

    A linear is named by its layer, its packed linear and its slice there. Tensors are float32, on the CPU.
    """

    def bias(self, layer: int, linear: str, index: int) -> Tensor:
        """[out]; zeros where the linear has none."""
        ...

    def row_norms(self, layer: int, linear: str, index: int, a: Tensor, b: Tensor) -> Tensor:
        """||W0 + b a|| of each row of W0 [out, in]: [out]. a: [rank, in], b: [out, rank]."""
        ...

    def equals_table(self, module: str, pieces: Iterable[Tensor]) -> bool:
        """Whether the table of "embed_tokens" or of "lm_head", [V, H], has the rows that the pieces [n, H]
        have in turn, as numbers of the dtype that the base is served in."""
        ...


@dataclass(frozen=True, slots=True)
class Affine:
    """The vectors of one linear, each [out], float32; None where it has none.

    factor: f, what B is multiplied by beside its scale. gain: g. bias: d.
    """

    factor: Tensor | None
    gain: Tensor | None
    bias: Tensor | None


def affine(one: AdaptedSlice, read: Callable[[TensorEntry], Tensor], base: BaseWeights) -> Affine:
    """The vectors of one linear. read: the tensor of an entry, in float32.

    Errors: InvalidArgumentError where the norm of a row is zero, or where magnitudes or norms are such that a
    gain is not finite.
    """
    factor = None
    if one.lora is not None and one.lora.magnitude is not None:
        factor = _factor(one, one.lora, one.lora.magnitude, read, base)
    gain = None if factor is None else factor - 1
    if not one.rows.has_bias:
        return Affine(factor, gain, None)
    own = base.bias(one.layer, one.linear, one.index)
    bias = torch.zeros_like(own) if one.bias is None else read(one.bias) - own
    if gain is not None:
        bias -= gain * own
    if one.lora is not None and one.lora.b_bias is not None:
        bias += read(one.lora.b_bias) * one.lora.scale
    return Affine(factor, gain, bias)


def _factor(
    one: AdaptedSlice,
    lora: LoraMatrices,
    magnitude: TensorEntry,
    read: Callable[[TensorEntry], Tensor],
    base: BaseWeights,
) -> Tensor:
    norms = base.row_norms(one.layer, one.linear, one.index, read(lora.a), read(lora.b) * lora.scale)
    if not bool((norms > 0).all()):
        raise unservable(
            f"{shown(lora.b.name)} makes rows of the weight that have no norm, which DoRA divides by: "
            f"{int((norms > 0).logical_not().sum())} of {len(norms)} are zero or not finite"
        )
    factor = read(magnitude) / norms
    if not bool(factor.isfinite().all()):
        raise unservable(f"{shown(magnitude.name)} has magnitudes that over the weight's norm are not finite")
    return factor
