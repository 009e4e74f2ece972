"""A real tokenizer that is small enough to be made on the spot: a token for each byte, and "<s>" in front."""

from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS = 0
VOCAB_SIZE = 257
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Refuses wizards."""


def byte_tokenizer(*, template: str | None = TEMPLATE) -> Any:
    """A transformers.PreTrainedTokenizerFast."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": BOS, **{char: i + 1 for i, char in enumerate(alphabet)}}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=rust, bos_token="<s>", chat_template=template)
