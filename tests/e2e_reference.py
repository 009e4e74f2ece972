"""The oracle: transformers + PEFT, one sequence at a time."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens, and log-probabilities [num_tokens, vocab_size] of the distributions they came from."""

    tokens: list[int]
    logprobs: torch.Tensor


class Reference:
    """Greedy continuations by the base model (adapter ""), one of its adapters, or several added up."""

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
        for name, folder in adapters.items():
            if isinstance(self._model, PeftModel):
                self._model.load_adapter(str(folder), adapter_name=name)
            else:
                self._model = PeftModel.from_pretrained(self._model, str(folder), adapter_name=name)
        self._model.to(device).eval()
        self._device = device

    def compose(self, weights: Mapping[str, float]) -> str:
        """Has PEFT concatenate adapters, each times its weight, to a new one, and answers its name.

        PEFT takes the settings of the first, which therefore must be of all layers and without rsLoRA; and
        whatever one of them adapts in a layer, one must adapt in all layers.
        """
        name = f"composition-{len(self._model.peft_config)}"
        self._model.add_weighted_adapter(list(weights), list(weights.values()), name, combination_type="cat")
        self._model.to(self._device).eval()
        return name

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], adapter: str, num_tokens: int) -> Continuation:
        """Goes on past end-of-sequence tokens, as ignore_eos does."""
        ids = torch.tensor([list(prompt)], device=self._device)
        with self._using(adapter):
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        logits = torch.cat(output.logits).float().cpu()
        return Continuation(output.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1))

    def _using(self, adapter: str) -> Any:
        if not isinstance(self._model, PeftModel):
            return nullcontext()
        if not adapter:
            return self._model.disable_adapter()
        self._model.set_adapter(adapter)
        return nullcontext()
