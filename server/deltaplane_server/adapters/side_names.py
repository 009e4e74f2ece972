"""Which module outside the linears of the layers each tensor of an adapter's file belongs to, by its name."""

import re
from dataclasses import replace

from deltaplane_kernels.layout import OutsideLayers
from deltaplane_server.adapters.files import WEIGHTS_FILE
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.tensor_names import ROOTS, NamedTensors
from deltaplane_server.adapters.unservable import listed, unservable

EMBEDDING, HEAD = "embed_tokens", "lm_head"

WEIGHT, BASE_WEIGHT = "weight", "base_layer.weight"
"""A weight of a module of the base; PEFT names it the latter where the module has LoRA."""

LORA_PARTS = {EMBEDDING: ("lora_embedding_A", "lora_embedding_B"), HEAD: ("lora_A", "lora_B")}

_PEFT_PREFIX = "base_model.model."
_DEFAULT_ROOT = "model."
_NAME = re.compile(
    r"(?P<module>.+?)\."
    r"(?P<part>(?:base_layer\.)?weight|lora_[AB](?:\.default)?\.weight|lora_embedding_[AB](?:\.default)?)"
)
_PATH = re.compile(rf"(?:{EMBEDDING}|layers\.\d.*|norm)$")

Parts = dict[str, dict[str, TensorEntry]]
"""Of each module, by its path without root, its tensors by part."""


def with_root(names: NamedTensors) -> NamedTensors:
    """The names, with the root that tensors outside the linears have where there are no others.

    Errors: InvalidArgumentError where they have several.
    """
    roots = {root for entry in names.outside if (root := _root_of(entry)) is not None}
    if names.linears:
        roots.add(names.root)
    if len(roots) > 1:
        raise unservable(f"{WEIGHTS_FILE} mixes names of bases in which {listed(roots)} comes first")
    return replace(names, root=roots.pop() if roots else _DEFAULT_ROOT)


def sort_side(names: NamedTensors, outside: OutsideLayers) -> tuple[Parts, list[TensorEntry]]:
    """The tensors by module and part, and those that are none of these. names: with their root.

    Errors: InvalidArgumentError where a part is there twice.
    """
    parts: Parts = {}
    others = []
    for entry in names.outside:
        module, part = _module_and_part(entry.name.removeprefix(_PEFT_PREFIX), names.root)
        if part not in _parts_of(module, outside):
            others.append(entry)
            continue
        own = parts.setdefault(module, {})
        if part in own:
            raise unservable(f"{WEIGHTS_FILE} has weights twice: {listed([entry.name, own[part].name])}")
        own[part] = entry
    return parts, others


def _root_of(entry: TensorEntry) -> str | None:
    """What comes before the path of a table or a norm; None for other tensors."""
    match = _NAME.fullmatch(entry.name.removeprefix(_PEFT_PREFIX))
    path = _PATH.search(match["module"]) if match else None
    root = match["module"][: path.start()] if match and path else None
    return root if root in ROOTS else None


def _module_and_part(name: str, root: str) -> tuple[str, str]:
    """The path of a module without its root, and which of its tensors a name is; two empty ones if none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return "", ""
    module, part = match["module"], match["part"].replace(".default", "")
    if part.startswith("lora_"):
        part = part.removesuffix(".weight")
    if module in (HEAD, f"language_model.{HEAD}"):
        return HEAD, part
    return (module.removeprefix(root), part) if module.startswith(root) else ("", "")


def _parts_of(module: str, outside: OutsideLayers) -> tuple[str, ...]:
    """What a file may have of a module."""
    if module in LORA_PARTS:
        return (WEIGHT, BASE_WEIGHT, *LORA_PARTS[module])
    return (WEIGHT,) if module in outside.norms else ()
