"""Tiny models, adapters that have something outside the linears of the layers, and the oracle over them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltaplane_server.config import EngineConfig
from e2e_reference import Reference
from in_process import Answer, Ask
from peft_factory import byte_tokenizer, make_adapter, make_tiny_model

VOCAB = len(byte_tokenizer())
PROMPT_LENGTHS = (1, 17, 40)
NUM_TOKENS = 12

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-untied": {"family": "llama"},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "qwen3-untied": {"family": "qwen3", "vocab_size": 299},
    "qwen3-tied": {"family": "qwen3", "tie_word_embeddings": True},
}
"""The vocabulary of 299 is no multiple of the alignment of rows."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 4},
    "head": {"rank": 4, "modules": ["q_proj", "lm_head"]},
    "head-alone": {"rank": 3, "modules": ["lm_head"], "rslora": True},
    "embedding": {"rank": 5, "alpha": 7, "modules": ["v_proj", "embed_tokens"]},
    "both": {
        "rank": 6,
        "modules": r".*(lm_head|embed_tokens|gate_proj)",
        "rank_pattern": {"lm_head": 17},
        "alpha_pattern": {"embed_tokens": 3},
    },
    "norms": {"rank": 4, "modules_to_save": ["norm"]},
    "some-norms": {"rank": 4, "modules_to_save": ["layers.1.input_layernorm", "post_attention_layernorm"]},
    "table": {"rank": 4, "modules_to_save": ["embed_tokens"]},
    "everything": {
        "rank": 4,
        "modules": ["q_proj", "lm_head"],
        "modules_to_save": ["embed_tokens", "model.norm", "input_layernorm"],
        "dtype": torch.bfloat16,
    },
}


@dataclass(frozen=True)
class Case:
    """A model, by the name of its variant, and its adapters. device: where it is served."""

    variant: str
    model: Path
    adapters: Mapping[str, Path]
    device: str

    @classmethod
    def make(cls, variant: str, folder: Path, device: str = "cpu", **config_overrides: Any) -> "Case":
        model = make_tiny_model(folder, **{**VARIANTS[variant], **config_overrides})
        adapters = {
            name: make_adapter(model, folder / name, seed=seed, **options)
            for seed, (name, options) in enumerate(ADAPTERS.items())
        }
        return cls(variant, model, adapters, device)

    def config(self, **options: Any) -> EngineConfig:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_num_batched_tokens": 48,
            "max_num_seqs": 48,
            "max_loras": len(self.adapters),
        }
        return EngineConfig(
            str(self.model),
            self.variant,
            device=self.device,
            kv_cache_bytes=16 << 20,
            max_lora_rank=17,
            **{**defaults, **options},
        )

    def asks(self) -> list[Ask]:
        rng = random.Random(self.variant)
        made = [
            Ask(adapter, [rng.randrange(256) for _ in range(length)], NUM_TOKENS, top=VOCAB)
            for length in PROMPT_LENGTHS
            for adapter in ("", *self.adapters)
        ]
        rng.shuffle(made)
        return made

    def check_equal(self, asks: Sequence[Ask], answers: Sequence[Answer], tolerance: float) -> None:
        """Compares answers with those of transformers + PEFT on the same device, in float32."""
        answered = list(zip(asks, answers, strict=True))
        for name in ("", *self.adapters):
            adapters = {name: self.adapters[name]} if name else {}
            reference = Reference(self.model, adapters, device=self.device)
            for ask, answer in ((ask, answer) for ask, answer in answered if ask.adapter == name):
                expected = reference.greedy(ask.prompt, name, ask.num_tokens)
                what = f"{name or 'base'}, prompt of {len(ask.prompt)}"
                assert answer.tokens == expected.tokens, what
                for place, token in enumerate(answer.logprobs):
                    ids, values = (list(column) for column in zip(*token.top, strict=True))
                    error = (expected.logprobs[place, ids] - torch.tensor(values)).abs().max()
                    assert error < tolerance, f"{what}, token {place}: off by {error}"
