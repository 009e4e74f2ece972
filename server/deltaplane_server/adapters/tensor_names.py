"""Which linear each tensor of an adapter's file belongs to, by its name."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.adapters.files import WEIGHTS_FILE
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.unservable import listed, unservable

ROOTS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""What comes before "layers." in a base: as in a language model, or in one that is part of a larger model."""

_NAME = re.compile(
    r"(?:base_model\.model\.)?"
    rf"(?P<root>{'|'.join(map(re.escape, ROOTS))})"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<module>[A-Za-z0-9_.]{1,100}?)"
    r"(?:(?:\.base_layer)?\.(?P<lora>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?P<leaf>\.weight|\.bias|)"
    r"|(?P<bias>\.base_layer\.bias|\.bias))"
)
"""As PEFT names them, and as other tools do: without PeftModel's prefix, under the text part of a larger
model, with the adapter's own name, or under a layer that was wrapped before."""

A, B, B_BIAS, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"
BIAS, WRAPPED_BIAS = "bias", "base_layer.bias"
"""What a linear may have. PEFT names the bias of a linear with LoRA as one of the base layer in it."""

_PARTS = (A, B, B_BIAS, MAGNITUDE, f"{MAGNITUDE}.weight")

_FEATURES = {
    "modules_to_save": "modules that were trained whole (modules_to_save)",
    "trainable_tokens": "trained token embeddings",
    "embed_tokens": "other parts of embed_tokens than LoRA and a trained table",
    "lm_head": "other parts of lm_head than LoRA",
}


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """What a file has of one linear, by part. name: the linear's in the base it was trained on."""

    name: str
    layer: int
    module: str
    parts: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def has_lora(self) -> bool:
        return A in self.parts


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The tensors of a file.

    linears: those of the linears of layers.
    root: what comes before "layers." in the names of the base they were trained on.
    outside: all others.
    """

    linears: list[LinearTensors]
    root: str
    outside: list[TensorEntry]


def sort_tensors(entries: Sequence[TensorEntry], modules: Collection[str]) -> NamedTensors:
    """The tensors by linear.

    modules: the linears of a layer, such as "self_attn.q_proj".
    Errors: InvalidArgumentError where a linear has a part twice, or where names differ in their beginning.
    """
    linears: dict[tuple[int, str], LinearTensors] = {}
    prefixes = {}
    outside = []
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        part = _part(match) if match else None
        if match is None or part is None or match["module"] not in modules:
            outside.append(entry)
            continue
        layer, module, root = int(match["layer"]), match["module"], match["root"]
        prefixes[entry.name[: match.start("layer")]] = root
        name = f"{root}layers.{layer}.{module}"
        parts = linears.setdefault((layer, module), LinearTensors(name, layer, module)).parts
        if part in parts:
            twice = [entry.name, parts[part].name]
            raise unservable(f"{WEIGHTS_FILE} has the same matrix twice: {listed(twice)}")
        parts[part] = entry
    if len(prefixes) > 1:
        raise unservable(f"{WEIGHTS_FILE} mixes names that start with {listed(prefixes)}; one is needed")
    return NamedTensors(list(linears.values()), next(iter(prefixes.values()), ""), outside)


def _part(match: "re.Match[str]") -> str | None:
    if match["bias"] is not None:
        return match["bias"][1:]
    part = match["lora"] + match["leaf"]
    return None if part not in _PARTS else MAGNITUDE if match["lora"] == MAGNITUDE else part


def not_served(names: Sequence[str], modules: Collection[str]) -> InvalidArgumentError:
    """The error for tensors that are none which this base takes. modules: the linears of a layer."""
    features = {feature for name in names for part, feature in _FEATURES.items() if part in name}
    if features:
        return unservable(
            f"{WEIGHTS_FILE} holds what is not served: {'; '.join(sorted(features))}: {listed(names)}"
        )
    return unservable(
        f"{WEIGHTS_FILE} has weights that belong to no linear of this base: {listed(names)}; it takes "
        f"lora_A.weight and lora_B.weight of {', '.join(modules)} in model.layers"
    )
