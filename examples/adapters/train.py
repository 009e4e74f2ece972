"""Trains the two example adapters with PEFT, on the CPU, from the texts beside this file.

    python examples/adapters/train.py --model "$(python examples/models/fetch_model.py)"

Each adapter becomes an ordinary PEFT folder: ``adapter_config.json`` and ``adapter_model.safetensors``. A run
is seeded: the same versions, machine and number of threads give the same weights.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEED = 20
BATCH_SIZE = 4
WARMUP_STEPS = 5
REPORT_EVERY_STEPS = 5
IGNORED_LABEL = -100  # the label that Hugging Face's loss leaves out


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained.

    The scales, alpha/r and rsLoRA's alpha/sqrt(r), are powers of two: folded into B they round nothing.
    """

    texts: str
    rank: int
    alpha: int
    rslora: bool
    target_modules: tuple[str, ...]
    epochs: int
    learning_rate: float

    def lora_config(self) -> LoraConfig:
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=self.rslora,
            target_modules=list(self.target_modules),
            task_type="CAUSAL_LM",
        )


RECIPES = {
    "legal-brief": Recipe(
        texts="legal_brief.jsonl",
        rank=8,
        alpha=16,
        rslora=False,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        epochs=5,
        learning_rate=1e-3,
    ),
    "creative-story": Recipe(
        texts="creative_story.jsonl",
        rank=16,
        alpha=16,
        rslora=True,
        target_modules=("q_proj", "v_proj"),
        epochs=8,
        learning_rate=1e-3,
    ),
}


@dataclass(frozen=True)
class Example:
    """Token ids of one chat, and labels that equal them on the completion and are ignored on the prompt."""

    ids: list[int]
    labels: list[int]


def read_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Puts each {"prompt", "completion"} line into the model's chat template, end token included."""
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": pair["prompt"]}], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        completion_ids = tokenizer(pair["completion"], add_special_tokens=False).input_ids
        completion_ids.append(tokenizer.eos_token_id)
        labels = [IGNORED_LABEL] * len(prompt_ids) + completion_ids
        examples.append(Example(prompt_ids + completion_ids, labels))
    return examples


def batches(examples: list[Example], pad_id: int, order: list[int]) -> Iterator[dict[str, torch.Tensor]]:
    """One epoch in the given order; ids, mask and labels are [BATCH_SIZE, longest example of the batch]."""
    for start in range(0, len(order), BATCH_SIZE):
        batch = [examples[i] for i in order[start : start + BATCH_SIZE]]
        yield {
            "input_ids": padded([example.ids for example in batch], pad_id),
            "attention_mask": padded([[1] * len(example.ids) for example in batch], 0),
            "labels": padded([example.labels for example in batch], IGNORED_LABEL),
        }


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    """[rows, longest row], filled up on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def train(name: str, recipe: Recipe, model_folder: Path) -> PeftModel:
    """Trains one adapter in float32 with AdamW, a short warm-up and a linear decay to zero."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    examples = read_examples(HERE / "texts" / recipe.texts, tokenizer)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(base, recipe.lora_config())
    model.train()

    steps = recipe.epochs * -(-len(examples) // BATCH_SIZE)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / (steps - WARMUP_STEPS))
    )
    size = sum(weight.numel() for weight in weights)
    log(f"{name}: {len(examples)} texts, {size:,} trainable weights, {steps} steps")
    started = time.monotonic()
    recent: list[float] = []
    step = 0
    for _ in range(recipe.epochs):
        order = torch.randperm(len(examples), generator=generator).tolist()
        for batch in batches(examples, tokenizer.pad_token_id, order):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            recent.append(loss.item())
            step += 1
            if step % REPORT_EVERY_STEPS == 0:
                mean = sum(recent) / len(recent)
                recent.clear()
                log(f"{name}: step {step}/{steps}, loss {mean:.3f}, {time.monotonic() - started:.0f} s")
    return model


def save(model: PeftModel, recipe: Recipe, folder: Path) -> None:
    """Writes the PEFT folder: weights in bfloat16, the base by its public name, modules in a fixed order."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = get_peft_model_state_dict(model, save_embedding_layers=False)
    stored = {key: tensor.to(torch.bfloat16).contiguous() for key, tensor in tensors.items()}
    weights = folder / "adapter_model.safetensors"
    save_file(stored, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file lets only its own user read them
    config = model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    config.base_model_name_or_path = BASE_MODEL
    config.inference_mode = True
    config.target_modules = sorted(recipe.target_modules)
    config.save_pretrained(str(folder))


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example adapters.")
    parser.add_argument(
        "adapters", nargs="*", metavar="ADAPTER", help=f"of {', '.join(RECIPES)}; all by default"
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that fetch_model.py printed")
    parser.add_argument("--out", type=Path, default=HERE, help="parent of the adapter folders")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice by default")
    args = parser.parse_args()
    names = args.adapters or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"no such adapter: {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; fetch_model.py prints the right folder")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for name in names:
        recipe = RECIPES[name]
        save(train(name, recipe, args.model), recipe, args.out / name)
        log(f"{name}: wrote {args.out / name}")


if __name__ == "__main__":
    main()
