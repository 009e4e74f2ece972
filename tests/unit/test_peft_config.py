"""adapter_config.json: what is applied, what is refused by name, and what makes no difference."""

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_files import make_config
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.adapters.peft_config import PeftLoraConfig, parse_config


def parse(config: Any) -> PeftLoraConfig:
    return parse_config(json.dumps(config).encode())


def refusal(config: Any) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(config)
    assert [violation.field for violation in caught.value.violations] == ["source"]
    return caught.value.message


def test_what_is_applied() -> None:
    config = parse(
        make_config(
            r=8,
            lora_alpha=12.5,
            use_rslora=True,
            rank_pattern={"q_proj": 4},
            alpha_pattern={"k_proj": 3},
            target_modules=["q_proj", "k_proj"],
            exclude_modules="v_proj",
            layers_to_transform=1,
            layers_pattern="layers",
            use_dora=True,
            bias="lora_only",
            modules_to_save=["norm", "embed_tokens"],
            ensure_weight_tying=True,
            base_model_name_or_path="org/base",
        )
    )
    assert config == PeftLoraConfig(
        rank=8,
        alpha=12.5,
        rslora=True,
        rank_pattern={"q_proj": 4},
        alpha_pattern={"k_proj": 3.0},
        target_modules=("q_proj", "k_proj"),
        exclude_modules="v_proj",
        layers_to_transform=(1,),
        layers_pattern=("layers",),
        use_dora=True,
        bias="lora_only",
        lora_bias=False,
        modules_to_save=("norm", "embed_tokens"),
        ensure_weight_tying=True,
        base_model="org/base",
    )


def test_absent_keys_have_the_defaults_of_peft() -> None:
    config = parse({"peft_type": "LORA"})
    assert (config.rank, config.alpha, config.rslora) == (8, 8.0, False)
    assert config.target_modules == ("q_proj", "v_proj")
    assert config.exclude_modules == ()
    assert config.layers_to_transform == ()
    assert config.layers_pattern == ()
    assert (config.use_dora, config.bias, config.lora_bias) == (False, "none", False)
    assert (config.modules_to_save, config.ensure_weight_tying) == ((), False)
    assert config.base_model == ""


@pytest.mark.parametrize(("rslora", "scale"), [(False, 4.0), (True, 8.0)])
def test_scale(rslora: bool, scale: float) -> None:
    assert parse(make_config(use_rslora=rslora)).scale(16, 4) == scale


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"trainable_token_indices": {"embed_tokens": [0]}}, "trainable_token_indices"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias True"),
        ({"use_dora": True, "init_lora_weights": "mica"}, "init_lora_weights 'mica'"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"alora_invocation_tokens": [5, 6]}, "Activated LoRA"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "replicated layers"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"arrow_config": {"top_k": 3}}, "Arrow"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"velora_config": {"num_groups": 64}}, "VeLoRA"),
        ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"),
        ({"megatron_config": {"hidden_size": 1}}, "Megatron"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"peft_type": "ADALORA"}, "peft_type 'ADALORA'"),
        ({"peft_type": None}, "peft_type None"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "OLoRA"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "brand_new"}, "init_lora_weights 'brand_new'"),
        ({"init_lora_weights": 3}, "init_lora_weights 3"),
        ({"a_later_feature": {"x": 1}}, "'a_later_feature'"),
        ({"a_later_feature": 0}, "'a_later_feature'"),
    ],
)
def test_what_changes_the_answer_is_refused_by_name(change: dict[str, Any], feature: str) -> None:
    assert feature in refusal(make_config(**change))


def test_all_refused_features_are_named_at_once() -> None:
    message = refusal(make_config(use_qalora=True, layer_replication=[[0, 2]], arrow_config={"top_k": 3}))
    assert "QA-LoRA" in message
    assert "replicated layers" in message
    assert "Arrow" in message


@pytest.mark.parametrize(
    "change",
    [
        {"lora_dropout": 0.5, "inference_mode": False, "task_type": "SEQ_CLS", "revision": "main"},
        {"peft_version": "9.9", "auto_mapping": {"base_model_class": "X", "unsloth_fixed": True}},
        {"fan_in_fan_out": True, "qalora_group_size": 16, "megatron_core": "megatron.core"},
        {"loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2}, "corda_config": {"cache_file": "x"}},
        {
            "modules_to_save": [],
            "trainable_token_indices": None,
            "layer_replication": None,
            "use_dora": None,
            "lora_bias": False,
            "bias": "none",
        },
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1}},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False},
        {"a_later_feature": None, "another": False, "third": {}, "fourth": []},
    ],
)
def test_what_makes_no_difference_is_accepted(change: dict[str, Any]) -> None:
    assert parse(make_config(**change)) == parse(make_config())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"r": 0}, "r 0; it must be a whole number from 1"),
        ({"r": -4}, "r -4"),
        ({"r": 8.0}, "r 8.0"),
        ({"r": True}, "r True"),
        ({"r": "8"}, "r '8'"),
        ({"r": None}, "r None"),
        ({"r": 10**30}, "r 1000"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern 0"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern ['q_proj']; it must be an object"),
        ({"lora_alpha": "16"}, "lora_alpha '16'; it must be a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern None"),
        ({"use_rslora": 1}, "use_rslora 1; it must be true or false"),
        ({"use_dora": "yes"}, "use_dora 'yes'; it must be true or false"),
        ({"lora_bias": 1}, "lora_bias 1; it must be true or false"),
        ({"bias": "some"}, "bias 'some'; it must be one of none, lora_only, all"),
        ({"bias": None}, "bias None"),
        ({"bias": ["all"]}, "bias ['all']"),
        ({"target_modules": {"q_proj": 1}}, "target_modules {'q_proj': 1}; it must be a string or a list"),
        ({"target_modules": ["q_proj", 3]}, "target_modules ['q_proj', 3]"),
        ({"exclude_modules": 5}, "exclude_modules 5"),
        ({"layers_to_transform": "0"}, "layers_to_transform '0'; it must be a layer or a list"),
        ({"layers_to_transform": [0, -1]}, "layers_to_transform [0, -1]"),
        (
            {"target_modules": ".*q_proj", "layers_to_transform": [0]},
            "absent where target_modules is a pattern",
        ),
        ({"layers_pattern": "layers"}, "absent without layers_to_transform"),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path 7"),
        ({"base_model_name_or_path": "x" * 5000}, "at most 1024 characters"),
        ({"base_model_name_or_path": "\ud800"}, "base_model_name_or_path '\\ud800'"),
    ],
)
def test_values_out_of_bounds_are_named(change: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(make_config(**change))


@pytest.mark.parametrize("alpha", [math.inf, -math.inf, math.nan])
def test_an_alpha_that_is_not_finite_is_refused(alpha: float) -> None:
    assert "is not a JSON number" in refusal(make_config(lora_alpha=alpha))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'"LORA"', "not a JSON object"),
        (b'{"r": 1, "r": 2}', "key 'r' is there twice"),
        (b'{"r": \xff}', "not valid JSON"),
        (b'{"r": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b"\x00" * 100, "not valid JSON"),
    ],
)
def test_what_is_not_a_json_object_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"adapter_config\.json is not") as caught:
        parse_config(data)
    assert complaint in caught.value.message


def test_messages_stay_short() -> None:
    assert len(refusal(make_config(**{"x" * 100_000: 1, "target_modules": ["y" * 100_000] * 9}))) < 1000
    assert len(refusal(make_config(target_modules={"y" * 100_000: 1}))) < 1000


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from([*make_config(), "rank_pattern", "alpha_pattern", "bias"]), JSON_VALUES)
)
def test_any_values_are_read_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidArgumentError):
        assert parse(make_config(**changes)).rank >= 1
