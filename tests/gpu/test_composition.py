"""Adapters that are added up on the GPU, against PEFT's concatenation of them on the same GPU."""

import random
from pathlib import Path
from typing import Any

from deltaplane_server.config import EngineConfig
from e2e_reference import Continuation, Reference
from in_process import Ask, in_process
from peft_factory import ADAPTERS, COMPOSITIONS, make_adapter, make_tiny_model

DEVICE = "cuda"
NAMES = sorted({name for weights in COMPOSITIONS for name in weights})
PROMPT_LENGTHS = (1, 16, 64, 150)


def make_asks() -> list[Ask]:
    """Each length of prompt with the base, each adapter and each composition, in a random order, with random
    lengths of output: prefills, mixed steps and decodes of ever smaller batches, all of them mixes."""
    rng = random.Random(1)
    asks = []
    for length in PROMPT_LENGTHS:
        prompt = [rng.randrange(256) for _ in range(length)]
        asks += [Ask(name, prompt, rng.randrange(1, 30)) for name in ("", *NAMES)]
        asks += [Ask("", prompt, rng.randrange(1, 30), weights=weights) for weights in COMPOSITIONS]
    rng.shuffle(asks)
    return asks


def continuations(model: Path, adapters: dict[str, Path], asks: list[Ask]) -> list[Continuation]:
    reference = Reference(model, adapters, device=DEVICE)
    names = [reference.compose(weights) for weights in COMPOSITIONS]
    return [
        reference.greedy(
            ask.prompt, names[COMPOSITIONS.index(ask.weights)] if ask.weights else ask.adapter, ask.num_tokens
        )
        for ask in asks
    ]


def test_float32_equals_peft_token_for_token(tmp_path: Path) -> None:
    """All slots are there; two are; and prompts are cached. Each time all of it twice: other mixes then meet
    the same graphs."""
    model = make_tiny_model(tmp_path, "llama", head_dim=64)
    adapters = {
        name: make_adapter(model, tmp_path / name, seed=seed, **ADAPTERS[name])
        for seed, name in enumerate(NAMES)
    }
    asks = make_asks()
    expected = continuations(model, adapters, asks)
    options: list[dict[str, Any]] = [{"max_loras": 4}, {"max_loras": 2}, {"enable_prefix_caching": True}]
    for option in options:
        chosen = [n for n, ask in enumerate(asks) if len(ask.weights) <= option.get("max_loras", 4)]
        config = EngineConfig(
            str(model),
            "llama",
            device=DEVICE,
            dtype="float32",
            max_lora_rank=17,
            max_num_seqs=48,
            max_num_batched_tokens=128,
            kv_cache_bytes=64 << 20,
            **option,
        )
        with in_process(config, model, adapters) as engine:
            for numbers in (chosen, chosen[::-1]):
                answers = engine.ask_all([asks[number] for number in numbers])
                for number, answer in zip(numbers, answers, strict=True):
                    what = asks[number].weights or asks[number].adapter or "base"
                    assert answer.tokens == expected[number].tokens, f"{what}, {option}"
