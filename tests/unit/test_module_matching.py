"""Which modules a configuration targets, with which rank and alpha: as PEFT decides, in bounded time."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from adapter_files import make_config
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.adapters import module_matching
from deltaplane_server.adapters.module_matching import ModuleMatcher
from deltaplane_server.adapters.peft_config import parse_config

KINDS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
NAMES = [
    f"{root}layers.{layer}.{kind}"
    for root in ("model.", "model.language_model.", "")
    for layer in (0, 1, 10)
    for kind in KINDS
]


def matcher(**changes: Any) -> ModuleMatcher:
    return ModuleMatcher(parse_config(json.dumps(make_config(**changes)).encode()))


def check_against_peft(**changes: Any) -> None:
    ours = matcher(**changes)
    config = LoraConfig(**make_config(**changes))
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    for name in NAMES:
        # PEFT answers a match object for a pattern, and an object that is false for an excluded module.
        assert ours.is_target(name) == bool(check_target_module_exists(config, name))
        rank = ranks.get(get_pattern_key(list(ranks), name), config.r)
        alpha = alphas.get(get_pattern_key(list(alphas), name), config.lora_alpha)
        assert ours.rank(name) == rank
        assert ours.scale(name) == alpha / (rank**0.5 if config.use_rslora else rank)


TARGETS: list[Any] = [
    ["q_proj"],
    ["q_proj", "mlp.down_proj"],
    ["self_attn.q_proj", "proj"],
    ["model.layers.1.self_attn.q_proj", "gate_proj"],
    ["layers.0.mlp.gate_proj"],
    ["", "."],
    r".*\.(q_proj|k_proj)",
    r"model\.layers\.\d+\.mlp\..*",
    r".*layers\.1\.(?:self_attn|mlp)\.(?!o_proj).*",
    r"(?i).*Q_PROJ",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))",
    "q_proj",
]
EXCLUDES: list[Any] = [None, ["o_proj"], ["layers.1.self_attn.q_proj", "mlp"], r".*layers\.0.*", "q_proj"]
PATTERNS = [
    "q_proj",
    "mlp.down_proj",
    r"layers\.[01]\.self_attn\..*",
    "^model.layers.1.mlp.gate_proj",
    "layers.1.self_attn.k_proj",
    ".*",
    "(q|k)_proj",
    r"\w+\.o_proj",
]


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("excludes", EXCLUDES)
def test_targets_are_those_of_peft(targets: Any, excludes: Any) -> None:
    check_against_peft(target_modules=targets, exclude_modules=excludes)


@pytest.mark.parametrize("layers", [0, [1], [0, 10], [], [7]])
@pytest.mark.parametrize(
    "layers_pattern", [None, "layers", ["h", "layers"], r"l\w+s", ["h"], "", "model|layers"]
)
@pytest.mark.parametrize("targets", [["q_proj"], ["model.layers.1.self_attn.q_proj", "self_attn.k_proj"]])
def test_layers_are_those_of_peft(layers: Any, layers_pattern: Any, targets: list[str]) -> None:
    check_against_peft(target_modules=targets, layers_to_transform=layers, layers_pattern=layers_pattern)


@settings(deadline=None)
@given(
    ranks=st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 9)),
    alphas=st.dictionaries(st.sampled_from(PATTERNS), st.integers(-3, 99) | st.floats(-9, 9)),
    rslora=st.booleans(),
)
def test_ranks_and_alphas_are_those_of_peft(ranks: Any, alphas: Any, rslora: bool) -> None:
    check_against_peft(rank_pattern=ranks, alpha_pattern=alphas, use_rslora=rslora)


@pytest.mark.parametrize("targets", ["all-linear", "ALL-LINEAR"])
def test_all_linear_is_every_linear_but_the_head(targets: str) -> None:
    ours = matcher(target_modules=targets, exclude_modules=["k_proj"])
    assert ours.is_target("model.layers.0.self_attn.q_proj")
    assert not ours.is_target("model.layers.0.self_attn.k_proj")
    assert not ours.is_target("lm_head")
    assert not ours.is_target("model.embed_tokens")


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "a{1000000}",
        "((((a{1000}){1000}){1000}){1000})",
        "(a{0,40}){0,40}",
        "x" * 5000,
        "(" * 2000 + ")" * 2000,
        "a{99999999999999999999}",
        "[[:alpha:]]+_proj",
        "(?:q_proj){e<=1}",
        "[a-z--q]",
        "(?<n>q)",
        r"\p{L}+",
        "q{}",
    ],
)
@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern", "layers_pattern"])
def test_patterns_that_are_not_served_are_refused(key: str, pattern: str) -> None:
    changes: dict[str, Any] = {key: {pattern: 4} if key == "rank_pattern" else pattern}
    if key == "layers_pattern":
        changes["layers_to_transform"] = [0]
    with pytest.raises(InvalidArgumentError) as caught:
        matcher(**changes)
    assert key in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_pattern_that_would_match_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_matching, "MATCH_SECONDS", 0.2)
    hostile = matcher(target_modules=r"(?:(?:.|.)|(?:.|.))*(?=X)")
    with pytest.raises(InvalidArgumentError, match="simplify them"):
        hostile.is_target(NAMES[0])
