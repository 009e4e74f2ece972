"""Checks that a file has exactly what its configuration gives to a base: no more, which PEFT would leave out,
and no less."""

from collections.abc import Iterable, Mapping, Sequence, Set

from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.module_matching import OUTSIDE_LAYERS, ModuleMatcher, endings
from deltaplane_server.adapters.peft_config import PeftLoraConfig
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.tensor_names import (
    B_BIAS,
    BIAS,
    MAGNITUDE,
    WRAPPED_BIAS,
    A,
    B,
    LinearTensors,
    NamedTensors,
)
from deltaplane_server.adapters.unservable import listed, unservable


def check_targets(
    names: NamedTensors, layer_of: Mapping[str, int], config: PeftLoraConfig, matcher: ModuleMatcher
) -> None:
    """That LoRA is on exactly the targets.

    layer_of: the layer of each linear of the base, by its name in the base that the adapter was trained on.
    Errors: InvalidArgumentError.
    """
    _check_whole(names.linears)
    _check_layers(names.linears, config, 1 + max(layer_of.values()))
    _check_present({one.name: one.layer for one in names.linears if one.has_lora}, layer_of, matcher)
    _check_known(config, [*layer_of, *(names.root + module for module in OUTSIDE_LAYERS)])


def check_parts(linears: Sequence[LinearTensors], config: PeftLoraConfig, biased: Set[str]) -> None:
    """That linears have the parts which the configuration gives them.

    biased: names of the linears of the base that have a bias.
    Errors: InvalidArgumentError.
    """
    adapted = [one for one in linears if one.has_lora]
    _check_part(adapted, MAGNITUDE, "use_dora", wanted=config.use_dora)
    _check_part(adapted, B_BIAS, "lora_bias", wanted=config.lora_bias)
    _check_biases(linears, config, biased)


def _check_whole(linears: Iterable[LinearTensors]) -> None:
    for one in linears:
        lora = one.parts.keys() - {BIAS, WRAPPED_BIAS}
        if lora and not lora >= {A, B}:
            names = [one.parts[part].name for part in lora]
            raise unservable(f"{WEIGHTS_FILE} has lora_A without lora_B, or the reverse, of {listed(names)}")


def _check_layers(linears: Iterable[LinearTensors], config: PeftLoraConfig, num_layers: int) -> None:
    base = f"this base has {num_layers} layers (0 to {num_layers - 1})"
    last = max((one.layer for one in linears), default=0)
    if last >= num_layers:
        raise unservable(
            f"{WEIGHTS_FILE} has weights for layer {last}; {base}: the adapter was trained for another base"
        )
    beyond = [str(layer) for layer in config.layers_to_transform if layer >= num_layers]
    if beyond:
        raise unservable(f"{CONFIG_FILE} has {listed(beyond)} in layers_to_transform; {base}")


def _check_present(present: Mapping[str, int], layer_of: Mapping[str, int], matcher: ModuleMatcher) -> None:
    """present: the layer of each linear with LoRA in the file."""
    targets = {name for name in layer_of if matcher.is_target(name)}
    extra = present.keys() - targets
    if extra:
        raise unservable(
            f"{WEIGHTS_FILE} has weights that {CONFIG_FILE} does not target, so that PEFT would leave them "
            f"out: {listed(extra)}"
        )
    missing = targets - present.keys()
    last = max(present.values(), default=-1)
    if missing and present and all(layer_of[name] > last for name in missing):
        raise unservable(
            f"{WEIGHTS_FILE} has weights for layers 0 to {last}; this base has {1 + max(layer_of.values())} "
            f"layers, and {CONFIG_FILE} targets more of them: the adapter was trained for another base"
        )
    if missing:
        raise unservable(f"{CONFIG_FILE} targets modules that have no weights: {listed(missing)}")


def _check_known(config: PeftLoraConfig, modules: Iterable[str]) -> None:
    if isinstance(config.target_modules, str):
        return
    unknown = set(config.target_modules) - {ending for name in modules for ending in endings(name)}
    if unknown:
        raise unservable(f"{CONFIG_FILE} targets modules that are not in this base: {listed(unknown)}")


def _check_part(adapted: Sequence[LinearTensors], part: str, key: str, *, wanted: bool) -> None:
    """That all linears with LoRA have a part, or none has it."""
    other = [one.name for one in adapted if (part in one.parts) is not wanted]
    if other and wanted:
        raise unservable(f"{CONFIG_FILE} sets {key}; {WEIGHTS_FILE} has no {part} of {listed(other)}")
    if other:
        raise unservable(f"{WEIGHTS_FILE} has {part} of {listed(other)}; {CONFIG_FILE} does not set {key}")


def _check_biases(linears: Sequence[LinearTensors], config: PeftLoraConfig, biased: Set[str]) -> None:
    """That trained biases are there for all linears that have one, or for none.

    PEFT saves those that the base has, under another name where the linear has LoRA. Earlier versions saved
    none with lora_only, and PEFT then leaves the base's as they are.
    """
    found = {one.name: entry.name for one in linears for _, entry in _biases(one)}
    if found and config.bias == "none":
        raise unservable(
            f"{WEIGHTS_FILE} has trained biases, and {CONFIG_FILE} has none (bias): {listed(found.values())}"
        )
    adapted = {one.name for one in linears if one.has_lora}
    expected = biased if config.bias == "all" else biased & adapted
    extra = found.keys() - expected
    if extra:
        raise unservable(
            f"{WEIGHTS_FILE} has biases of linears that have none in this base, or that are not trained with "
            f"bias: {config.bias}: {listed(found[name] for name in extra)}"
        )
    misnamed = [
        entry.name
        for one in linears
        for part, entry in _biases(one)
        if (part == WRAPPED_BIAS) != one.has_lora
    ]
    if misnamed:
        raise unservable(
            f"{WEIGHTS_FILE} has biases by names that PEFT would leave out; with LoRA a bias is called "
            f"{WRAPPED_BIAS}, without {BIAS}: {listed(misnamed)}"
        )
    missing = expected - found.keys()
    if found and missing:
        raise unservable(f"{WEIGHTS_FILE} has trained biases, but none of {listed(missing)}")


def _biases(one: LinearTensors) -> list[tuple[str, TensorEntry]]:
    return [(part, one.parts[part]) for part in (BIAS, WRAPPED_BIAS) if part in one.parts]
