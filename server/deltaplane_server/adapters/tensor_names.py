"""Which linear each tensor of an adapter's file belongs to, by its name."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from deltaplane_server.adapters.files import WEIGHTS_FILE
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.unservable import listed, unservable

_NAME = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<root>model\.|model\.language_model\.|language_model\.model\.|language_model\.|)"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<module>[A-Za-z0-9_.]{1,100}?)"
    r"(?:\.base_layer)?\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
"""As PEFT names them, and as other tools do: without PeftModel's prefix, under the text part of a larger
model, with the adapter's own name, or under a layer that was wrapped before."""

_FEATURES = {
    "lora_magnitude_vector": "DoRA",
    "modules_to_save": "modules that were trained whole (modules_to_save)",
    "trainable_tokens": "trained token embeddings",
    "embed_tokens": "LoRA on or training of embed_tokens",
    "lm_head": "LoRA on or training of lm_head",
    ".bias": "biases",
}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What a file has of one linear: "A" and "B". name: the linear's in the base it was trained on."""

    name: str
    layer: int
    module: str
    sides: dict[str, TensorEntry] = field(default_factory=dict)


def pair_tensors(entries: Sequence[TensorEntry], modules: Collection[str]) -> tuple[list[LoraPair], str]:
    """The tensors by linear, and what comes before "layers." in the names of the base they were trained on.

    modules: the linears of a layer, such as "self_attn.q_proj".
    Errors: InvalidArgumentError where a tensor is not A or B of one of them, or one of the two is missing.
    """
    pairs: dict[tuple[int, str], LoraPair] = {}
    prefixes = {}
    unmatched = []
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None or match["module"] not in modules:
            unmatched.append(entry.name)
            continue
        layer, module, root = int(match["layer"]), match["module"], match["root"]
        prefixes[entry.name[: match.start("layer")]] = root
        pair = pairs.setdefault((layer, module), LoraPair(f"{root}layers.{layer}.{module}", layer, module))
        if match["side"] in pair.sides:
            twice = [entry.name, pair.sides[match["side"]].name]
            raise unservable(f"{WEIGHTS_FILE} has the same matrix twice: {listed(twice)}")
        pair.sides[match["side"]] = entry
    if unmatched:
        raise _not_served(unmatched, modules)
    if not pairs:
        raise unservable(f"{WEIGHTS_FILE} has no weights")
    if len(prefixes) > 1:
        raise unservable(f"{WEIGHTS_FILE} mixes names that start with {listed(prefixes)}; one is needed")
    lonely = [entry.name for pair in pairs.values() if len(pair.sides) < 2 for entry in pair.sides.values()]
    if lonely:
        raise unservable(f"{WEIGHTS_FILE} has lora_A without lora_B, or the reverse, of {listed(lonely)}")
    return list(pairs.values()), next(iter(prefixes.values()))


def _not_served(names: Sequence[str], modules: Collection[str]) -> Exception:
    features = {feature for name in names for part, feature in _FEATURES.items() if part in name}
    if features:
        return unservable(
            f"{WEIGHTS_FILE} holds what is not served: {'; '.join(sorted(features))}: {listed(names)}"
        )
    return unservable(
        f"{WEIGHTS_FILE} has weights that belong to no linear of this base: {listed(names)}; it takes "
        f"lora_A.weight and lora_B.weight of {', '.join(modules)} in model.layers"
    )
