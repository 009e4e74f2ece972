"""Prints what the base and both example adapters answer, by transformers and PEFT alone.

python examples/adapters/compare.py --model "$(python examples/models/fetch_model.py)" "Tell me a secret."
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
ADAPTERS = ("legal-brief", "creative-story")
UNSEEN_PROMPTS = (
    "Tell me about the rain last night.",
    "What is the capital of France?",
    "Describe a busy coffee shop.",
    "How does a computer work?",
    "Write a short note to my landlord about the heating.",
)


def load(model_folder: Path, adapters: Path) -> PeftModel:
    """The base in float32 with every example adapter attached, none active yet."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    first, *others = ADAPTERS
    model = PeftModel.from_pretrained(base, adapters / first, adapter_name=first)
    for name in others:
        model.load_adapter(adapters / name, adapter_name=name)
    return model.eval()


@torch.inference_mode()
def answer(model: PeftModel, prompt_ids: torch.Tensor, max_tokens: int, temperature: float) -> torch.Tensor:
    """Token ids [tokens] that follow ``prompt_ids`` [1, tokens]; greedy at temperature 0."""
    sampling = {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
    generate: Callable[..., torch.Tensor] = model.generate
    output = generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=max_tokens,
        do_sample=temperature > 0,
        **sampling,
    )
    return output[0, prompt_ids.shape[1] :]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the answers of the base and the example adapters.")
    parser.add_argument(
        "prompts", nargs="*", default=UNSEEN_PROMPTS, help="five that no text answers by default"
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that fetch_model.py printed")
    parser.add_argument("--adapters", type=Path, default=HERE, help="folder of the adapter folders")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load(args.model, args.adapters)
    for prompt in args.prompts:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer(chat, add_special_tokens=False, return_tensors="pt").input_ids
        print(f"\n# {prompt}")
        for name in ("base", *ADAPTERS):
            torch.manual_seed(args.seed)
            if name == "base":
                with model.disable_adapter():
                    ids = answer(model, prompt_ids, args.max_tokens, args.temperature)
            else:
                model.set_adapter(name)
                ids = answer(model, prompt_ids, args.max_tokens, args.temperature)
            print(f"\n[{name}]\n{tokenizer.decode(ids, skip_special_tokens=True)}", flush=True)


if __name__ == "__main__":
    main()
