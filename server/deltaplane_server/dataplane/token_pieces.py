"""Which tokens of a vocabulary are text of their own, so that they can be looked up instead of decoded."""

import json
from collections.abc import Collection, Mapping
from typing import Any

_BEFORE = "a"
_REPLACEMENT = "\ufffd"


def find_pieces(tokenizer: Any, byte_fallback_ids: Collection[int]) -> Mapping[int, str]:
    """Tokens that add the same text after any other text, and that text; see engine.api.TokenDecoder.pieces.

    Each token is decoded once, after a token that keeps it from the start of the text. Empty where the
    tokenizer's decoder could make a token's text depend on its neighbours.

    tokenizer: a tokenizers.Tokenizer.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"]
    before = tokenizer.encode(_BEFORE, add_special_tokens=False).ids
    before_text = tokenizer.decode(before)
    if not _decodes_one_by_one(decoder) or not before_text.endswith(_BEFORE):
        return {}
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    candidates = [
        token_id
        for token_id in tokenizer.get_vocab().values()
        if token_id not in special and token_id not in byte_fallback_ids
    ]
    texts = tokenizer.decode_batch([[*before, token_id] for token_id in candidates])
    return {
        token_id: text[len(before_text) :]
        for token_id, text in zip(candidates, texts, strict=True)
        if text.startswith(before_text) and _REPLACEMENT not in text
    }


def _decodes_one_by_one(decoder: Any) -> bool:
    """Whether a decoder treats each token as it would alone, but for the start of the text, for characters
    whose bytes come in several tokens, and for runs of byte-fallback tokens."""
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return all(map(_decodes_one_by_one, parts))
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return len(pattern) == 1
        case {"type": "Strip", "stop": stop}:
            return bool(stop == 0)
        case {"type": kind}:
            return kind in ("ByteLevel", "Metaspace", "ByteFallback", "Fuse")
    return False
