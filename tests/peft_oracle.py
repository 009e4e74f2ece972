"""transformers + PEFT on a tiny model, asked whether tokens are those that it would have chosen."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM


class PeftOracle:
    """The base model in a folder, and adapters on copies of it: trained biases change the base itself."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._base.train(False)

    def model(self, adapter: Path | None) -> Any:
        """The base with the adapter in a folder, as PEFT loads it."""
        if adapter is None:
            return self._base
        return PeftModel.from_pretrained(copy.deepcopy(self._base), str(adapter)).eval()

    @torch.inference_mode()
    def logits(self, adapter: Path | None, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocabulary]: what each token is chosen by, given the prompt and the tokens before it.

        Greedy tokens are right, one after the other, where each is the likeliest of its row.
        """
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        rows: Tensor = self.model(adapter)(input_ids=ids).logits[0, len(prompt) - 1 :]
        return rows
