"""Rotary frequencies of a model, by transformers' own functions."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deltaplane_controlplane.errors import InvalidArgumentError

SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """inv_freq: head_dim / 2 angles in radians per position, exact float32 values.

    scaling: multiplies cos and sin.
    """

    inv_freq: tuple[float, ...]
    scaling: float


def build_rope(hf: PretrainedConfig, head_dim: int) -> Rope:
    """The frequencies that hold for every length up to longest_exact_length(hf).

    Errors: InvalidArgumentError, which names the kind of scaling that is not served.
    """
    parameters = _checked_parameters(hf)
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return Rope(tuple((1.0 / (parameters["rope_theta"] ** exponents)).tolist()), 1.0)
    try:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"rope_parameters {parameters} are incomplete: {error!r}") from error
    return Rope(tuple(inv_freq.float().tolist()), float(scaling))


def longest_exact_length(hf: PretrainedConfig) -> tuple[int, str]:
    """The most tokens for which the frequencies do not depend on how long the sequence has become, and why.

    "longrope" changes to other frequencies past its original length, and "dynamic" past
    max_position_embeddings: keys that are cached already would be of the wrong kind.
    """
    parameters = hf.rope_parameters or {}
    if parameters.get("rope_type") == "longrope":
        return (
            int(parameters["original_max_position_embeddings"]),
            "original_max_position_embeddings; beyond it the frequencies of longrope depend on the length",
        )
    return int(hf.max_position_embeddings), "the model's max_position_embeddings"


def _checked_parameters(hf: PretrainedConfig) -> dict[str, Any]:
    parameters = dict(hf.rope_parameters or {})
    kind = parameters.get("rope_type")
    if kind not in SERVED_ROPE_TYPES:
        raise InvalidArgumentError(
            f"rope scaling {kind or parameters!r} is not served; served are {', '.join(SERVED_ROPE_TYPES)}, "
            "the same in all layers"
        )
    part = parameters.get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise InvalidArgumentError(
            f"partial_rotary_factor {part} is not served; served are whole heads (1.0)"
        )
    return parameters
