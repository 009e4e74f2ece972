"""The real small model with both example adapters, through a real server: equal to transformers + PEFT."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from e2e_reference import Reference
from e2e_streams import Ask, ask_all
from serving import Served, served
from small_model import small_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
ADAPTERS = {name: EXAMPLES / name for name in ("legal-brief", "creative-story")}
PROMPTS = (
    "Tell me about the rain last night.",
    "Write a few lines about the old bridge. 🌉",
    "The ship left the harbour before dawn, and",
)
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(small_model(), tmp_path_factory.mktemp("small"), adapters=ADAPTERS) as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(small_model(), ADAPTERS)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(small_model())


async def test_base_and_both_adapters_in_one_batch(
    server: Served, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    asks = [Ask(adapter, prompt, NUM_TOKENS) for prompt in PROMPTS for adapter in ("", *ADAPTERS)]
    answers = await ask_all(server.address, asks)
    for ask, answer in zip(asks, answers, strict=True):
        expected = reference.greedy(tokenizer.encode(ask.prompt), ask.adapter, NUM_TOKENS)
        assert answer.tokens == expected.tokens, (ask.adapter, ask.prompt)
        assert answer.text == tokenizer.decode(expected.tokens, skip_special_tokens=True)
    for same_prompt in zip(*[iter(answers)] * 3, strict=True):
        assert len({answer.text for answer in same_prompt}) == 3
