"""The model's tokenizer: text to ids, ids to text, conversations to text."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.dataplane.token_pieces import find_pieces
from deltaplane_server.startup import StartupError, one_line

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_MANY_TOKENS = 256
_NORMALIZED_SHRINKS = 4
"""No Unicode normal form is shorter than a quarter of a text's bytes (Unicode Standard Annex 15)."""


class Tokenizer:
    """A fast (Rust) Hugging Face tokenizer. Safe to call from several threads at once.

    Calls go to the Rust object itself, and for long texts to its batch form: only that lets go of the GIL,
    so that a long text stalls neither the event loop nor the engine.

    max_token_bytes: no token stands for more bytes of text than this.
    byte_fallback_ids, pieces: see engine.api.TokenDecoder.
    """

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a transformers.PreTrainedTokenizerFast. Errors: StartupError, where it is not fast."""
        if not tokenizer.is_fast:
            raise StartupError(
                f"the model's tokenizer ({type(tokenizer).__name__}) has no tokenizer.json; convert it with "
                "transformers' save_pretrained"
            )
        self._templates = tokenizer
        self._rust = tokenizer.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self.has_chat_template: bool = tokenizer.chat_template is not None
        vocabulary: dict[str, int] = self._rust.get_vocab()
        longest = max(len(token.encode()) for token in vocabulary)
        self.max_token_bytes = longest * (1 if self._rust.normalizer is None else _NORMALIZED_SHRINKS)
        self.byte_fallback_ids = frozenset(
            token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
        )
        self.pieces = find_pieces(self._rust, self.byte_fallback_ids)

    @classmethod
    def load(cls, model: Path) -> "Tokenizer":
        """The tokenizer in a model's folder. Errors: StartupError."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(model, local_files_only=True))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise StartupError(
                f"MODEL {model}: its tokenizer cannot be read ({one_line(error)[:300]})"
            ) from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text, with the special tokens that the model expects around it where asked for."""
        encoding = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; an id that the tokenizer has no token for stands for nothing."""
        text: str
        if len(token_ids) <= _MANY_TOKENS:
            text = self._rust.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._rust.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """A conversation in the form that the model was trained on.

        messages: "role" and "content" of each turn.
        Errors: InvalidArgumentError, where the template refuses the conversation.
        """
        try:
            text: str = self._templates.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidArgumentError.for_field(
                "messages",
                f"the model's chat template refuses the conversation ({one_line(error)[:200]}); mend its "
                "roles and their order",
                reason="CHAT_TEMPLATE_REFUSED",
            ) from error
        return text
