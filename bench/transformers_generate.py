"""The yardstick of cpu.py: transformers' (and PEFT's) own generate on one batch, in a process of its own.

Reads a job as JSON from standard input, writes figures as JSON to standard output:
{"model", "dtype", "prompts", "tokens", "repeats", "adapters": {name: path}, "mix": [name | ""]}.
All cores are used.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    model.eval()
    inputs = tokenizer(job["prompts"], return_tensors="pt", padding=True)
    figures = {"base": _measure(model, inputs, job)}
    if job["adapters"]:
        figures["mixed"] = _measure(_with_adapters(model, job["adapters"]), inputs, job, job["mix"])
    json.dump(figures, sys.stdout)


def _with_adapters(model: Any, adapters: dict[str, str]) -> Any:
    from peft import PeftModel

    (first, path), *others = adapters.items()
    peft_model = PeftModel.from_pretrained(model, path, adapter_name=first)
    for name, path in others:
        peft_model.load_adapter(path, adapter_name=name)
    return peft_model.eval()


def _measure(model: Any, inputs: Any, job: dict[str, Any], mix: list[str] | None = None) -> list[float]:
    """Tokens per second of each repeat, after one warm-up."""
    options: dict[str, Any] = {
        "max_new_tokens": job["tokens"],
        "min_new_tokens": job["tokens"],
        "do_sample": False,
    }
    if mix is not None:
        options["adapter_names"] = [name or "__base__" for name in mix]
    rates = []
    with torch.inference_mode():
        for repeat in range(job["repeats"] + 1):
            start = time.perf_counter()
            output = model.generate(**inputs, **options)
            seconds = time.perf_counter() - start
            made = (output.shape[1] - inputs["input_ids"].shape[1]) * output.shape[0]
            if made != job["tokens"] * len(job["prompts"]):
                raise SystemExit(f"generate made {made} tokens instead of the {job['tokens']} asked for")
            if repeat:
                rates.append(made / seconds)
    return rates


if __name__ == "__main__":
    main()
