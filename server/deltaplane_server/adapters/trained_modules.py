"""Which modules of a base an adapter was trained with whole (modules_to_save), by PEFT's own rule.

PEFT takes each module whose name ends with one of the names, and not only at a dot: "norm" is every norm. The
rule is that of _set_trainable in peft.utils.other of PEFT 0.21.
"""

from collections.abc import Mapping

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_server.adapters.files import CONFIG_FILE
from deltaplane_server.adapters.peft_config import PeftLoraConfig
from deltaplane_server.adapters.unservable import listed, shown, unservable


def trained_modules(
    config: PeftLoraConfig, served: Mapping[str, str], head: str, layout: AdapterLayout, root: str
) -> list[str]:
    """The paths of the modules that were trained whole, in the order of `served`.

    served: the path of each module that may be, by its name in the base that the adapter was trained on.
    head: the name of the head there. root: what comes before "layers." there.
    Errors: InvalidArgumentError where one of the names is of no module, or of one that is not served.
    """
    everything = {*served, head, *_other_modules(layout, root)}
    asked: set[str] = set()
    for name in config.modules_to_save:
        matched = {module for module in everything if module.endswith(name)}
        if not matched:
            raise unservable(
                f"{CONFIG_FILE} has {shown(name)} in modules_to_save, which is no module of this base"
            )
        asked |= matched
    if head in asked:
        raise unservable(
            f"{CONFIG_FILE} has {head} in modules_to_save; a whole head of its own is not served, because "
            "each step would read one for each such adapter: train LoRA on it instead"
        )
    others = asked - served.keys()
    if others:
        raise unservable(
            f"{CONFIG_FILE} has more in modules_to_save than norms and embed_tokens, which alone are served: "
            f"{listed(others)}"
        )
    return [path for name, path in served.items() if name in asked]


def _other_modules(layout: AdapterLayout, root: str) -> set[str]:
    """The linears, and what holds other modules or has nothing to train."""
    inside = ["", ".self_attn", ".mlp", ".mlp.act_fn"]
    inside += [f".{part.module}" for linear in layout.linears for part in linear.slices]
    in_layers = {f"{root}layers.{layer}{name}" for layer in range(layout.num_layers) for name in inside}
    return in_layers | {root.removesuffix("."), f"{root}layers", f"{root}rotary_emb"}
