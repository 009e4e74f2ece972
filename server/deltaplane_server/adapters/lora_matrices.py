"""Finds an adapter's matrices in its file: those that its configuration means, in a base that has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltaplane_kernels.layout import AdapterLayout, PackedLinear
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.module_matching import OUTSIDE_LAYERS, ModuleMatcher, endings
from deltaplane_server.adapters.peft_config import PeftLoraConfig
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.tensor_names import LoraPair, pair_tensors
from deltaplane_server.adapters.unservable import listed, shown, unservable


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """A and B of one linear.

    layer, linear, index: the layer, the packed linear's name and the slice there that it is.
    module: its path inside the layer, such as "self_attn.q_proj".
    scale: the factor on B A.
    a, b: where they are in the file, [rank, in] and [out, rank].
    """

    layer: int
    linear: str
    index: int
    module: str
    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry


def find_matrices(
    entries: Sequence[TensorEntry], config: PeftLoraConfig, layout: AdapterLayout, max_rank: int
) -> list[LoraMatrices]:
    """An adapter's matrices, ordered by layer and then as in the layout.

    Errors: InvalidArgumentError where the file's names, shapes and ranks are not exactly what the
    configuration gives to this base, or where a rank is over max_rank.
    """
    linears = {
        part.module: (linear, index) for linear in layout.linears for index, part in enumerate(linear.slices)
    }
    pairs, root = pair_tensors(entries, linears)
    layer_of = {
        f"{root}layers.{layer}.{module}": layer for layer in range(layout.num_layers) for module in linears
    }
    matcher = ModuleMatcher(config)
    _check_layers(pairs, config, layout.num_layers)
    _check_outside(root, matcher)
    _check_targets(pairs, layer_of, matcher)
    _check_known(config, layer_of)
    order = {name: place for place, name in enumerate(layer_of)}
    pairs.sort(key=lambda pair: order[pair.name])
    return [_matrices(pair, *linears[pair.module], matcher, max_rank) for pair in pairs]


def _check_layers(pairs: Sequence[LoraPair], config: PeftLoraConfig, num_layers: int) -> None:
    base = f"this base has {num_layers} layers (0 to {num_layers - 1})"
    last = max(pair.layer for pair in pairs)
    if last >= num_layers:
        raise unservable(
            f"{WEIGHTS_FILE} has weights for layer {last}; {base}: the adapter was trained for another base"
        )
    beyond = [str(layer) for layer in config.layers_to_transform if layer >= num_layers]
    if beyond:
        raise unservable(f"{CONFIG_FILE} has {listed(beyond)} in layers_to_transform; {base}")


def _check_outside(root: str, matcher: ModuleMatcher) -> None:
    outside = [
        module for module in OUTSIDE_LAYERS if matcher.is_target(module) or matcher.is_target(root + module)
    ]
    if outside:
        raise unservable(f"{CONFIG_FILE} targets {' and '.join(outside)}; LoRA there is not served")


def _check_targets(pairs: Sequence[LoraPair], layer_of: Mapping[str, int], matcher: ModuleMatcher) -> None:
    """The file must have weights for exactly the targets. layer_of: the layer of each linear of the base."""
    targets = {name for name in layer_of if matcher.is_target(name)}
    present = {pair.name for pair in pairs}
    if present - targets:
        raise unservable(
            f"{WEIGHTS_FILE} has weights that {CONFIG_FILE} does not target, so that PEFT would leave them "
            f"out: {listed(present - targets)}"
        )
    missing = targets - present
    last = max(pair.layer for pair in pairs)
    if missing and all(layer_of[name] > last for name in missing):
        raise unservable(
            f"{WEIGHTS_FILE} has weights for layers 0 to {last}; this base has {1 + max(layer_of.values())} "
            f"layers, and {CONFIG_FILE} targets more of them: the adapter was trained for another base"
        )
    if missing:
        raise unservable(f"{CONFIG_FILE} targets modules that have no weights: {listed(missing)}")


def _check_known(config: PeftLoraConfig, layer_of: Mapping[str, int]) -> None:
    if isinstance(config.target_modules, str):
        return
    unknown = set(config.target_modules) - {ending for name in layer_of for ending in endings(name)}
    if unknown:
        raise unservable(f"{CONFIG_FILE} targets modules that are not in this base: {listed(unknown)}")


def _matrices(
    pair: LoraPair, linear: PackedLinear, index: int, matcher: ModuleMatcher, max_rank: int
) -> LoraMatrices:
    rank = matcher.rank(pair.name)
    if rank > max_rank:
        raise unservable(
            f"rank {rank} (of {pair.name}) is over --max-lora-rank {max_rank}: raise the limit",
            reason="ADAPTER_TOO_LARGE",
        )
    a, b = pair.sides["A"], pair.sides["B"]
    shapes = {a: (rank, linear.in_features), b: (linear.slices[index].out_features, rank)}
    for entry, shape in shapes.items():
        if entry.shape != shape:
            raise unservable(
                f"{shown(entry.name)} has shape {entry.shape}; {pair.module} of this base, with rank {rank} "
                f"of {CONFIG_FILE}, takes {shape}"
            )
    return LoraMatrices(
        layer=pair.layer,
        linear=linear.name,
        index=index,
        module=pair.module,
        rank=rank,
        scale=matcher.scale(pair.name),
        a=a,
        b=b,
    )
