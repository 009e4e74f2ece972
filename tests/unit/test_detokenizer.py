"""Incremental detokenisation against the tokenizers that models have."""

from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from deltaplane_server.dataplane.token_pieces import find_pieces
from deltaplane_server.engine.detokenizer import Detokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then over the other one.",
    "def main():\n    return {'a': 1}\n\n\n",
    "Fünf süße Äpfel; naïve café, e\u0301 and n\u0303 with combining marks",
    "東京都は日本の首都です。人工智能很有意思。한국어도 있어요",
    "👩‍👩‍👧‍👦 family, 🇯🇵 flag, 👍🏽 thumbs, 🎉🎉🎉",
    "नमस्ते दुनिया שלום עולם مرحبا",
    "  two leading spaces, and three   inside, and trailing ones  ",
    "𐍈 gothic, 𠮷野家, a real \ufffd sign",
]


class RealDecoder:
    """A tokenizer as the engine sees it, which counts the tokens it is made to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        bytes_ = [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]
        self.byte_fallback_ids = frozenset(token for token in bytes_ if token is not None)
        self.pieces = find_pieces(tokenizer, self.byte_fallback_ids)
        self.num_decoded = 0

    def ids(self, pieces: Iterable[str]) -> list[int]:
        vocabulary = self.tokenizer.get_vocab()
        return [vocabulary[piece] for piece in pieces]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def add_tokens(tokenizer: Tokenizer) -> RealDecoder:
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return RealDecoder(tokenizer)


def byte_level() -> RealDecoder:
    """GPT-2, Llama 3, Qwen, SmolLM: bytes are part of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return add_tokens(tokenizer)


def byte_fallback_vocabulary() -> dict[str, int]:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁"]
    pieces += [chr(code) for code in range(ord("!"), ord("~") + 1)] + list("üäéß東京人日")
    pieces += ["", "th", "he", "▁t", "▁th", "the", "▁the", "in", "▁q", "▁o", "ver"]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


BYTE_FALLBACK_MERGES = [
    ("▁", "▁"), ("t", "h"), ("h", "e"), ("▁", "t"), ("▁t", "h"), ("th", "e"), ("▁th", "e"), ("i", "n"),
    ("▁", "q"), ("▁", "o"),
]  # fmt: skip


def byte_fallback(decoder: decoders.Decoder) -> RealDecoder:
    tokenizer = Tokenizer(
        models.BPE(
            vocab=byte_fallback_vocabulary(),
            merges=BYTE_FALLBACK_MERGES,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return add_tokens(tokenizer)


def llama_2() -> RealDecoder:
    """Bytes for what has no piece; the space before the first word is dropped."""
    return byte_fallback(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1, right=0),
            ]
        )
    )


def gemma() -> RealDecoder:
    """Bytes for what has no piece; the first space stays."""
    return byte_fallback(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def metaspace() -> RealDecoder:
    """Spaces are pieces, and there are no bytes."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.0)], 0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", show_progress=False)
    trainer.special_tokens = [AddedToken("<unk>")]
    tokenizer.train_from_iterator(TEXTS, trainer)
    decoder = add_tokens(tokenizer)
    assert not decoder.byte_fallback_ids
    return decoder


FAMILIES: list[Callable[[], RealDecoder]] = [byte_level, llama_2, gemma, metaspace]
DECODERS = {family.__name__: family() for family in FAMILIES}

families = pytest.mark.parametrize("family", list(DECODERS))
texts = st.lists(st.sampled_from(TEXTS) | st.text(max_size=20), max_size=4).map(" ".join)


def fragments(decoder: RealDecoder) -> st.SearchStrategy[int]:
    """Tokens that are one byte of a longer character, special ones, and one without text, where the
    vocabulary has such."""
    vocabulary = decoder.tokenizer.get_vocab()
    pieces = ["</s>", "", *(f"<0x{byte:02X}>" for byte in "é€🦊".encode()), *_byte_letters("é€🦊")]
    return st.sampled_from([vocabulary[piece] for piece in pieces if piece in vocabulary])


def stream(decoder: RealDecoder, token_ids: Sequence[int], *, skip: bool = True) -> list[str]:
    """The deltas of an output, and what was held back at its end."""
    detokenizer = Detokenizer(decoder, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.tail()]


@families
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_tokens(family: str, data: st.DataObject, skip: bool) -> None:
    """Malformed characters and special tokens included, at every point of the stream."""
    decoder = DECODERS[family]
    size = decoder.tokenizer.get_vocab_size()
    token_ids = data.draw(st.lists(st.integers(0, size - 1) | fragments(decoder), max_size=90))
    detokenizer = Detokenizer(decoder, skip_special_tokens=skip)
    text = ""
    for length, token in enumerate(token_ids, 1):
        text += detokenizer.push(token)
        expected = decoder.decode(token_ids[:length], skip_special_tokens=skip)
        assert text + detokenizer.tail() == expected


@families
@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_text_is_never_split(family: str, text: str) -> None:
    decoder = DECODERS[family]
    token_ids = decoder.tokenizer.encode(text, add_special_tokens=False).ids
    expected = decoder.decode(token_ids, skip_special_tokens=True)
    deltas = stream(decoder, token_ids)
    assert "".join(deltas) == expected
    assert sum(delta.count("\ufffd") for delta in deltas) == expected.count("\ufffd")


@families
def test_text_is_streamed_as_it_comes(family: str) -> None:
    """Plain words are not held back: after each token, all of its text is out."""
    decoder = DECODERS[family]
    token_ids = decoder.tokenizer.encode(" in the other one", add_special_tokens=False).ids
    detokenizer = Detokenizer(decoder, skip_special_tokens=True)
    text = ""
    for length, token in enumerate(token_ids, 1):
        text += detokenizer.push(token)
        assert text == decoder.decode(token_ids[:length], skip_special_tokens=True)


@families
def test_plain_words_are_looked_up(family: str) -> None:
    """Once a text has begun, none of its tokens is decoded."""
    decoder = DECODERS[family]
    token_ids = decoder.tokenizer.encode("in the other one", add_special_tokens=False).ids
    detokenizer = Detokenizer(decoder, skip_special_tokens=True)
    begin = "".join(detokenizer.push(token) for token in token_ids[:2])
    decoder.num_decoded = 0
    rest = "".join(detokenizer.push(token) for token in token_ids[2:])
    assert decoder.num_decoded == 0
    assert begin + rest == decoder.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(content=" ", left=0, right=1)]),
        None,
    ],
)
def test_nothing_is_looked_up_where_text_may_depend_on_neighbours(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    assert find_pieces(tokenizer, ()) == {}
    tokenizer.decoder = decoders.ByteLevel()
    assert find_pieces(tokenizer, ()) == {0: "a", 1: "b"}


def test_pieces_are_whole_and_not_special() -> None:
    decoder = DECODERS["byte_level"]
    special, tool, letter, byte = decoder.ids(["</s>", "<tool>", "x", _byte_letters("é")[0]])
    assert {special, byte}.isdisjoint(decoder.pieces)
    assert (decoder.pieces[tool], decoder.pieces[letter]) == ("<tool>", "x")


def test_an_emoji_comes_whole() -> None:
    decoder = DECODERS["byte_level"]
    token_ids = decoder.ids(_byte_letters("🦊"))
    assert stream(decoder, token_ids) == ["", "", "", "🦊", ""]


def test_a_cut_emoji_is_one_replacement_character_at_the_end() -> None:
    decoder = DECODERS["byte_level"]
    token_ids = decoder.ids(_byte_letters("🦊"))
    assert stream(decoder, token_ids[:3]) == ["", "", "", "\ufffd"]


def test_a_run_of_fallback_bytes_waits_for_its_end() -> None:
    """A following byte would turn all of the run into U+FFFD, so says the tokenizer."""
    decoder = DECODERS["llama_2"]
    newline, fox, the = "<0x0A>", [f"<0x{byte:02X}>" for byte in "🦊".encode()], "▁the"
    token_ids = decoder.ids([newline, *fox, the])
    assert stream(decoder, token_ids) == ["", "", "", "", "", "\n🦊 the", ""]
    assert stream(decoder, token_ids[:3]) == ["", "", "", "\ufffd" * 3]


@families
@pytest.mark.parametrize("piece", ["</s>", "<0xE2>", "â", "<unk>", "▁"])
def test_cost_is_constant_per_token(family: str, piece: str) -> None:
    """Also for endless special tokens and bytes that never become a character."""
    decoder = DECODERS[family]
    token = decoder.tokenizer.token_to_id(piece)
    if token is None:
        token = decoder.tokenizer.get_vocab_size() - 1
    decoder.num_decoded = 0
    stream(decoder, [token] * 2000)
    assert decoder.num_decoded < 2000 * 40


class EmptyTokens(RealDecoder):
    """A vocabulary in which the last token has no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.pieces = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        last = self.tokenizer.get_vocab_size() - 1
        visible = [token for token in token_ids if token != last]
        return super().decode(visible, skip_special_tokens=skip_special_tokens)


def test_many_tokens_without_text_inside_a_character() -> None:
    decoder = EmptyTokens(DECODERS["byte_level"].tokenizer)
    empty = decoder.tokenizer.get_vocab_size() - 1
    first, *others = decoder.ids(_byte_letters("🦊"))
    assert "".join(stream(decoder, [first, *[empty] * 100, *others])) == "🦊"
    assert decoder.num_decoded < 500


def _byte_letters(text: str) -> str:
    """The bytes of a text as the printable letters that byte-level vocabularies have for them (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(b if b in printable else 256 + others.index(b)) for b in text.encode())
