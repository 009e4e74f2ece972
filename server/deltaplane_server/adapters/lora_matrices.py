"""Finds what an adapter's file has for the linears of a base: what its configuration means, in a base that
has them."""

from dataclasses import dataclass

from deltaplane_kernels.layout import AdapterLayout, PackedLinear
from deltaplane_kernels.rank_pages import SliceRows
from deltaplane_server.adapters.files import CONFIG_FILE
from deltaplane_server.adapters.module_matching import ModuleMatcher
from deltaplane_server.adapters.peft_config import PeftLoraConfig
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.target_checks import check_parts, check_targets
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
from deltaplane_server.adapters.unservable import shown, unservable


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """LoRA on one linear: where its tensors are in the file.

    scale: the factor on B A.
    a, b: [rank, in] and [out, rank].
    b_bias: [out], of lora_B; None where that has none.
    magnitude: [out], of DoRA; None without.
    """

    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry
    b_bias: TensorEntry | None = None
    magnitude: TensorEntry | None = None


@dataclass(frozen=True, slots=True)
class AdaptedSlice:
    """What an adapter has for one linear.

    layer, linear, index: the layer, the packed linear's name and the slice there that it is.
    module: its path inside the layer, such as "self_attn.q_proj".
    rows: what it takes in rank pages.
    lora: None where the linear's bias alone was trained.
    bias: [out], which takes the place of the base's; None where it was not trained.
    """

    layer: int
    linear: str
    index: int
    module: str
    rows: SliceRows
    lora: LoraMatrices | None
    bias: TensorEntry | None


def find_matrices(
    names: NamedTensors, config: PeftLoraConfig, layout: AdapterLayout, max_rank: int
) -> list[AdaptedSlice]:
    """What the file has for the linears of the layers, ordered by layer and then as in the layout.

    Errors: InvalidArgumentError where the file's names, shapes and ranks are not exactly what the
    configuration gives to this base, or where a rank is over max_rank.
    """
    linears = {
        part.module: (linear, index) for linear in layout.linears for index, part in enumerate(linear.slices)
    }
    named = {
        f"{names.root}layers.{layer}.{module}": (layer, linear.has_bias)
        for layer in range(layout.num_layers)
        for module, (linear, _) in linears.items()
    }
    layer_of = {name: layer for name, (layer, _) in named.items()}
    matcher = ModuleMatcher(config)
    check_targets(names, layer_of, config, matcher)
    check_parts(names.linears, config, {name for name, (_, has_bias) in named.items() if has_bias})
    order = {name: place for place, name in enumerate(layer_of)}
    return [
        _adapted_slice(one, *linears[one.module], matcher, max_rank)
        for one in sorted(names.linears, key=lambda one: order[one.name])
    ]


def check_rank(name: str, rank: int, max_rank: int) -> None:
    """Errors: InvalidArgumentError where the rank of the module of this name is over max_rank."""
    if rank > max_rank:
        raise unservable(
            f"rank {rank} (of {name}) is over --max-lora-rank {max_rank}: raise the limit",
            reason="ADAPTER_TOO_LARGE",
        )


def _adapted_slice(
    tensors: LinearTensors, linear: PackedLinear, index: int, matcher: ModuleMatcher, max_rank: int
) -> AdaptedSlice:
    lora = _lora(tensors, matcher, max_rank) if tensors.has_lora else None
    bias = tensors.parts.get(WRAPPED_BIAS) or tensors.parts.get(BIAS)
    _check_shapes(tensors, linear, index, 0 if lora is None else lora.rank)
    has_gain = lora is not None and lora.magnitude is not None
    adds_bias = bias is not None or (lora is not None and lora.b_bias is not None)
    return AdaptedSlice(
        layer=tensors.layer,
        linear=linear.name,
        index=index,
        module=tensors.module,
        rows=SliceRows(
            rank=0 if lora is None else lora.rank,
            has_gain=has_gain,
            has_bias=adds_bias or (has_gain and linear.has_bias),
        ),
        lora=lora,
        bias=bias,
    )


def _lora(tensors: LinearTensors, matcher: ModuleMatcher, max_rank: int) -> LoraMatrices:
    rank = matcher.rank(tensors.name)
    check_rank(tensors.name, rank, max_rank)
    return LoraMatrices(
        rank=rank,
        scale=matcher.scale(tensors.name),
        a=tensors.parts[A],
        b=tensors.parts[B],
        b_bias=tensors.parts.get(B_BIAS),
        magnitude=tensors.parts.get(MAGNITUDE),
    )


def _check_shapes(tensors: LinearTensors, linear: PackedLinear, index: int, rank: int) -> None:
    out = linear.slices[index].out_features
    shapes = {A: (rank, linear.in_features), B: (out, rank)}
    for part, entry in tensors.parts.items():
        shape = shapes.get(part, (out,))
        if entry.shape != shape:
            base = f"this base, with rank {rank} of {CONFIG_FILE}," if rank else "this base"
            raise unservable(
                f"{shown(entry.name)} has shape {entry.shape}; {tensors.module} of {base} takes {shape}"
            )
