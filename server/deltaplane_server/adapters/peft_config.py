"""adapter_config.json: what PEFT's LoRA configuration says of how an adapter is applied.

Every key is in one of three tables: applied, refused by name where it is set, or without effect on the
answer. A key in none of them comes from a later PEFT, and is refused where it is set. What each key does to
the answer is read from peft.tuners.lora of PEFT 0.21.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltaplane_server.adapters.files import CONFIG_FILE
from deltaplane_server.adapters.strict_json import parse_object
from deltaplane_server.adapters.unservable import listed, shown, unservable

MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096
MAX_RANK = 1 << 16
MAX_BASE_MODEL_LENGTH = 1024

BIASES = ("none", "lora_only", "all")

DEFAULT_RANK = 8
DEFAULT_ALPHA = 8
DEFAULT_TARGETS = ("q_proj", "v_proj")
"""What PEFT targets in Llama, Mistral, Qwen2 and Qwen3 where target_modules is null."""

_APPLIED = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
    "bias",
    "lora_bias",
    "use_dora",
    "modules_to_save",
    "ensure_weight_tying",
    "base_model_name_or_path",
}

_REFUSED_WHERE_SET = {
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "use_qalora": "QA-LoRA (use_qalora)",
    "alora_invocation_tokens": "Activated LoRA (alora_invocation_tokens)",
    "layer_replication": "replicated layers (layer_replication)",
    "target_parameters": "LoRA on bare parameters (target_parameters)",
    "arrow_config": "Arrow routing (arrow_config)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "kasa_config": "KaSA (kasa_config)",
    "velora_config": "VeLoRA (velora_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "megatron_config": "Megatron layers (megatron_config)",
}

_WITHOUT_EFFECT = {
    # about where it comes from
    "auto_mapping",
    "peft_version",
    "revision",
    "task_type",
    # about training
    "inference_mode",
    "lora_dropout",
    "runtime_config",
    # read only together with an option that is refused
    "corda_config",
    "eva_config",
    "lora_ga_config",
    "loftq_config",
    "megatron_core",
    "qalora_group_size",
    # PEFT turns it off for linears
    "fan_in_fan_out",
}

_HARMLESS_INITS = {"gaussian", "eva", "orthogonal", "mica"}
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftLoraConfig:
    """What decides which linears have which scale and rank.

    rank_pattern, alpha_pattern: module patterns to ranks and alphas; the first that matches counts.
    target_modules, exclude_modules: one pattern for whole module names, or names and endings of them.
    layers_to_transform: empty for all layers. layers_pattern: names of the list of layers; empty for any.
    use_dora: whether there are magnitudes, of DoRA. lora_bias: whether lora_B has a bias.
    bias: whose biases were trained: "none", "lora_only" (of linears with LoRA) or "all".
    modules_to_save: names of modules that were trained whole, or endings of such names.
    ensure_weight_tying: whether a tied head and table have the same LoRA, or the same trained weight.
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    use_dora: bool
    bias: str
    lora_bias: bool
    modules_to_save: tuple[str, ...]
    ensure_weight_tying: bool
    base_model: str

    @property
    def targets_all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def scale(self, alpha: float, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski, 2023)."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def parse_config(data: bytes) -> PeftLoraConfig:
    """Reads adapter_config.json. Errors: InvalidArgumentError, which names what cannot be served."""
    config = parse_object(data, CONFIG_FILE)
    _refuse_features(config)
    targets = config.get("target_modules")
    layers = config.get("layers_to_transform")
    layers_pattern = _names(config, "layers_pattern")
    if isinstance(targets, str) and (layers is not None or layers_pattern):
        raise _bad("layers_to_transform", layers, "absent where target_modules is a pattern, as PEFT has it")
    if layers_pattern and layers is None:
        raise _bad("layers_pattern", config["layers_pattern"], "absent without layers_to_transform")
    use_dora, lora_bias = _boolean(config, "use_dora"), _boolean(config, "lora_bias")
    if use_dora and lora_bias:
        raise _bad("lora_bias", lora_bias, "false with use_dora, as PEFT has it")
    init = config.get("init_lora_weights")
    if use_dora and init == "mica":
        raise _bad("init_lora_weights", init, "another one with use_dora, as PEFT has it")
    return PeftLoraConfig(
        rank=_rank("r", config.get("r", DEFAULT_RANK)),
        alpha=_alpha("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA)),
        rslora=_boolean(config, "use_rslora"),
        rank_pattern={
            key: _rank("rank_pattern", value) for key, value in _table(config, "rank_pattern").items()
        },
        alpha_pattern={
            key: _alpha("alpha_pattern", value) for key, value in _table(config, "alpha_pattern").items()
        },
        target_modules=DEFAULT_TARGETS if targets is None else _names_or_pattern(config, "target_modules"),
        exclude_modules=_names_or_pattern(config, "exclude_modules"),
        layers_to_transform=_layers(layers),
        layers_pattern=layers_pattern,
        use_dora=use_dora,
        bias=_bias(config.get("bias", "none")),
        lora_bias=lora_bias,
        modules_to_save=_names(config, "modules_to_save"),
        ensure_weight_tying=_boolean(config, "ensure_weight_tying"),
        base_model=_base_model(config.get("base_model_name_or_path")),
    )


def _refuse_features(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise unservable(f"{CONFIG_FILE} is of peft_type {shown(config.get('peft_type'))}; LORA is served")
    features = [feature for key, feature in _REFUSED_WHERE_SET.items() if _is_set(config.get(key))]
    if features:
        raise unservable(f"{CONFIG_FILE} asks for what is not served: {'; '.join(features)}")
    _refuse_changed_base(config.get("init_lora_weights", True))
    known = _APPLIED | _REFUSED_WHERE_SET.keys() | _WITHOUT_EFFECT
    unknown = [key for key, value in config.items() if key not in known and _is_set(value)]
    if unknown:
        raise unservable(
            f"{CONFIG_FILE} sets {listed(unknown)}, which this server does not know and which may change the "
            "answer; remove it if it does not"
        )


def _refuse_changed_base(init: Any) -> None:
    """Some initialisations change the base first, so that the delta is one to another base than this."""
    if isinstance(init, bool) or (isinstance(init, str) and init.lower() in _HARMLESS_INITS):
        return
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise unservable(
            f"{CONFIG_FILE} has init_lora_weights {shown(init)}, which changes weights of the base; save "
            "the adapter with save_pretrained(path_initial_model_for_weight_conversion=...), which makes it "
            "ordinary LoRA"
        )
    raise unservable(f"{CONFIG_FILE} has init_lora_weights {shown(init)}, which is not known here")


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ({}, [], "")


def _bad(key: str, value: Any, wanted: str) -> Exception:
    return unservable(f"{CONFIG_FILE} has {key} {shown(value)}; it must be {wanted}")


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _bad(key, value, f"a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(key: str, value: Any) -> float:
    try:
        alpha = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha):
        raise _bad(key, value, "a finite number")
    return alpha


def _boolean(config: Mapping[str, Any], key: str) -> bool:
    value = False if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise _bad(key, value, "true or false")
    return value


def _bias(value: Any) -> str:
    if not isinstance(value, str) or value not in BIASES:
        raise _bad("bias", value, f"one of {', '.join(BIASES)}")
    return value


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = {} if config.get(key) is None else config[key]
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise _bad(key, value, f"an object of at most {MAX_PATTERNS} patterns")
    return value


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """One name or several."""
    value = config.get(key) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or len(names) > MAX_PATTERNS or not all(isinstance(n, str) for n in names):
        raise _bad(key, value, f"a string or a list of at most {MAX_PATTERNS} strings")
    return tuple(names)


def _names_or_pattern(config: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    names = _names(config, key)
    return names[0] if isinstance(config.get(key), str) and names else names


def _layers(value: Any) -> tuple[int, ...]:
    layers = [] if value is None else value if isinstance(value, list) else [value]
    if len(layers) > MAX_PATTERNS or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise _bad("layers_to_transform", value, f"a layer or a list of at most {MAX_PATTERNS} layers")
    return tuple(layers)


def _base_model(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_BASE_MODEL_LENGTH or not value.isprintable():
        raise _bad("base_model_name_or_path", value, f"a name of at most {MAX_BASE_MODEL_LENGTH} characters")
    return value
