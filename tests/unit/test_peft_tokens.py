"""Adapters that PEFT saves, served: the tokens and logits of transformers + PEFT, in batches of all kinds.

DELTAPLANE_FIDELITY_EXAMPLES is how many random batches are tried; the few of a usual run are always the same.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from peft_factory import ALL_LINEARS, make_adapter, make_tiny_model
from peft_oracle import PeftOracle
from served_model import MAX_RANK, Request, ServedModel

EXAMPLES = int(os.environ.get("DELTAPLANE_FIDELITY_EXAMPLES", "0"))
USUAL_EXAMPLES = 60
NUM_TOKENS = 5
TOLERANCE = 5e-5
ROUNDING = 1e-5
"""Of two logits that are as near to each other either may be the higher one: they differ by rounding."""

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}),
    "mistral": ("mistral", {"sliding_window": 6, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}
"""Models by name: the family, and what differs from make_tiny_model's own."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


class Bench:
    """Models of BASES, each made once, served and with its oracle."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._adapters = 0
        self.base = cache(self._base)

    def _base(self, name: str) -> tuple[Path, ServedModel, PeftOracle]:
        family, options = BASES[name]
        folder = make_tiny_model(self._folder / name, family, **options)
        return folder, ServedModel(folder), PeftOracle(folder)

    def adapter(self, base: str, options: dict[str, Any]) -> Path:
        self._adapters += 1
        folder, _, _ = self.base(base)
        return make_adapter(
            folder, self._folder / f"adapter-{self._adapters}", **{"seed": self._adapters, **options}
        )

    def check(self, base: str, requests: list[Request]) -> None:
        """Serves all requests in one batch."""
        _, served, oracle = self.base(base)
        replies = served.greedy(requests, NUM_TOKENS)
        for request, reply in zip(requests, replies, strict=True):
            logits = oracle.logits(request.adapter, request.prompt, reply.tokens)
            assert is_likeliest(logits, reply.tokens)
            torch.testing.assert_close(reply.logprobs, logits.log_softmax(-1), rtol=0, atol=TOLERANCE)

    def features(self, base: str, adapter: Path) -> tuple[str, ...]:
        return self.base(base)[1].manifests[adapter].features


def is_likeliest(logits: torch.Tensor, tokens: list[int]) -> bool:
    """logits: [n, vocabulary]. Whether each of n tokens has the highest one, but for rounding."""
    own = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((logits.amax(-1) - own <= ROUNDING).all())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bases"))


PROMPT = list(b"The sea was ")


@pytest.mark.parametrize(
    ("base", "options", "features"),
    [
        ("llama", {"use_dora": True}, ("dora",)),
        ("llama-biased", {"use_dora": True, "rank": 17, "rslora": True}, ("dora",)),
        ("qwen2", {"use_dora": True, "rank": 6, "bias": "lora_only"}, ("bias", "dora")),
        (
            "llama-biased",
            {"use_dora": True, "bias": "all", "modules": ["k_proj", "down_proj"]},
            ("bias", "dora"),
        ),
        ("llama", {"bias": "all"}, ()),
        ("qwen2", {"bias": "lora_only", "modules": ["q_proj", "up_proj"]}, ("bias",)),
        ("qwen2-tied", {"bias": "all", "modules": ["down_proj"], "layers_to_transform": [1]}, ("bias",)),
        ("mistral", {"lora_bias": True, "rank": 8, "rslora": True}, ("bias",)),
        ("llama-biased", {"lora_bias": True, "bias": "all", "modules": ["q_proj", "down_proj"]}, ("bias",)),
        ("qwen3", {"use_dora": True, "dtype": torch.bfloat16, "rank_pattern": {"q_proj": 3}}, ("dora",)),
        ("llama", {"use_dora": True, "fan_in_fan_out": True, "init_lora_weights": "gaussian"}, ("dora",)),
        ("llama", {"fan_in_fan_out": True}, ()),
        ("llama-tied", {"modules": ["q_proj", "lm_head"], "rslora": True}, ("lm_head",)),
        ("qwen2", {"modules": r".*(embed_tokens|lm_head|up_proj)"}, ("embed_tokens", "lm_head")),
        (
            "llama-tied",
            {"modules": ["q_proj", "lm_head"], "ensure_weight_tying": True, "alpha_pattern": {"lm_head": 3}},
            ("embed_tokens", "lm_head"),
        ),
        (
            "qwen2-tied",
            {"modules": r"(.*\.)?embed_tokens|.*k_proj", "ensure_weight_tying": True},
            ("embed_tokens", "lm_head"),
        ),
        (
            "qwen2-tied",
            {"modules": r"model\.embed_tokens|.*k_proj", "ensure_weight_tying": True},
            ("embed_tokens",),
        ),
        ("qwen3", {"modules": ["lm_head"], "modules_to_save": ["norm"]}, ("lm_head", "trained_norms")),
        (
            "llama-tied",
            {"modules": ["v_proj", "embed_tokens"], "modules_to_save": ["embed_tokens"]},
            ("trained_embeddings",),
        ),
        (
            "llama-biased",
            {"use_dora": True, "bias": "all", "modules_to_save": ["embed_tokens", "input_layernorm"]},
            ("bias", "dora", "trained_embeddings", "trained_norms"),
        ),
    ],
    ids=str,
)
def test_features_beside_base_and_plain_rows(
    bench: Bench, base: str, options: dict[str, Any], features: tuple[str, ...]
) -> None:
    adapter = bench.adapter(base, {"rank": 4, **options})
    plain = bench.adapter(base, {"rank": 3})
    requests = [Request(who, PROMPT[:length]) for who, length in ((None, 9), (adapter, 12), (plain, 1))]
    bench.check(base, [*requests, *requests[::-1]])
    assert bench.features(base, adapter) == features


@pytest.mark.parametrize("options", [{"use_dora": True, "bias": "lora_only"}, {"bias": "all"}], ids=str)
def test_bfloat16_is_no_further_from_float32_than_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error of first tokens' log-probabilities, relative to their spread over the vocabulary."""
    folder = make_tiny_model(
        tmp_path, "qwen2", hidden_size=128, intermediate_size=256, initializer_range=0.06
    )
    adapter = make_adapter(folder, tmp_path / "a", dtype=torch.bfloat16, **options)
    prompts = [[(7 * start + 3 * place) % 256 for place in range(30)] for start in range(12)]
    replies = ServedModel(folder, torch.bfloat16).greedy([Request(adapter, one) for one in prompts], 1)
    ours = torch.cat([reply.logprobs for reply in replies])
    exact, theirs = (
        torch.cat([PeftOracle(folder, dtype).logits(adapter, one, [0]) for one in prompts]).log_softmax(-1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    spread = (exact - exact.mean(-1, keepdim=True)).norm()
    assert (ours - exact).norm() < 0.03 * spread
    assert (ours - exact).norm() < 1.15 * (theirs.float() - exact).norm()


PATTERNS = [
    "q_proj",
    "mlp.down_proj",
    "layers.1.self_attn.k_proj",
    r"layers\.0\..*",
    "^model.*up_proj",
    "lm_head",
    "embed_tokens",
]
TRAINED: list[list[str] | None] = [
    None,
    None,
    ["norm"],
    ["model.norm", "embed_tokens"],
    ["input_layernorm", "1.post_attention_layernorm"],
    ["embed_tokens"],
]

targets = st.one_of(
    st.sets(st.sampled_from(ALL_LINEARS), min_size=1).map(sorted),
    st.just("all-linear"),
    st.sampled_from([r".*\.layers\.\d+\.self_attn\.(q|v)_proj", r"model\.layers\.1\..*_proj"]),
)


def tables(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """PEFT saves patterns in the order of their keys, and the first that matches counts."""
    return st.dictionaries(st.sampled_from(PATTERNS), values, max_size=2).map(
        lambda t: dict(sorted(t.items()))
    )


@st.composite
def adapters(draw: st.DrawFn) -> dict[str, Any]:
    modules = draw(targets)
    options: dict[str, Any] = {
        "rank": draw(st.integers(1, MAX_RANK)),
        "alpha": draw(st.integers(-40, 40).filter(bool) | st.floats(0.25, 64)),
        "rslora": draw(st.booleans()),
        "modules": modules,
        "rank_pattern": draw(tables(st.integers(1, MAX_RANK))),
        "alpha_pattern": draw(tables(st.integers(1, 64))),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        "bias": draw(st.sampled_from(["none", "none", "lora_only", "all"])),
        "fan_in_fan_out": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"use_dora": True}, {"use_dora": True}, {"lora_bias": True}])),
    }
    if not isinstance(modules, str):
        if not (options.get("use_dora") or options.get("lora_bias")):
            options["modules"] = [*modules, *draw(st.sets(st.sampled_from(["embed_tokens", "lm_head"])))]
        if draw(st.booleans()):
            options["layers_to_transform"] = draw(st.sampled_from([[0], [1], 1, [0, 1]]))
    options["modules_to_save"] = draw(st.sampled_from(TRAINED))
    trains_table = "embed_tokens" in (options["modules_to_save"] or ())
    options["ensure_weight_tying"] = not trains_table and draw(st.booleans())
    return options


@pytest.mark.timeout(120 + 2 * EXAMPLES)
@settings(
    deadline=None,
    max_examples=EXAMPLES or USUAL_EXAMPLES,
    derandomize=not EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    base=st.sampled_from(list(BASES)),
    kinds=st.lists(adapters(), min_size=1, max_size=3),
    who=st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 40)), min_size=4, max_size=6),
    data=st.randoms(use_true_random=False),
)
def test_any_batch_of_any_adapters(
    bench: Bench, base: str, kinds: list[dict[str, Any]], who: list[tuple[int, int]], data: Any
) -> None:
    """who: the adapter, -1 for the base, and the length of the prompt, of each request."""
    made = [bench.adapter(base, options) for options in kinds]
    bench.check(
        base,
        [
            Request(
                None if number < 0 else made[number % len(made)],
                [data.randrange(256) for _ in range(length)],
            )
            for number, length in who
        ],
    )
