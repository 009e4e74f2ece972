"""Prompts become token ids as the model's tokenizer makes them, or are refused before that."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers
from transformers import PreTrainedTokenizerFast as _PreTrainedTokenizerFast

from byte_tokenizer import BOS, byte_tokenizer
from deltaplane.v1 import generation_pb2 as pb
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.dataplane.prompts import Prompts
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.dataplane.violations import Violations
from deltaplane_server.startup import StartupError

PreTrainedTokenizerFast: Any = _PreTrainedTokenizerFast  # untyped


def limits(max_model_len: int = 64, *, has_chat_template: bool = True) -> RequestLimits:
    return RequestLimits(
        vocab_size=257,
        max_model_len=max_model_len,
        kv_tokens=1024,
        eos_token_ids=frozenset(),
        has_chat_template=has_chat_template,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> Iterator[Prompts]:
    prompts = Prompts(tokenizer, limits())
    yield prompts
    prompts.close()


async def refusal(prompts: Prompts, request: pb.GenerateRequest) -> dict[str, str]:
    found = Violations()
    await prompts.token_ids(request, found)
    with pytest.raises(InvalidArgumentError) as caught:
        found.raise_if_any()
    return {violation.field: violation.description for violation in caught.value.violations}


async def ids_of(prompts: Prompts, request: pb.GenerateRequest) -> list[int]:
    found = Violations()
    ids = list(await prompts.token_ids(request, found))
    found.raise_if_any()
    return ids


def conversation(*turns: tuple[str, str], **options: bool) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns], **options)


async def test_text_gets_the_special_tokens_of_the_model(prompts: Prompts) -> None:
    ids = await ids_of(prompts, pb.GenerateRequest(text="hi"))
    assert ids == byte_tokenizer()("hi").input_ids
    assert ids[0] == BOS


async def test_token_ids_are_used_as_they_are(prompts: Prompts) -> None:
    assert await ids_of(prompts, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 256]))) == [5, 256]


async def test_messages_are_rendered_by_the_template_without_more_special_tokens(prompts: Prompts) -> None:
    opened = await prompts.tokenize_messages(conversation(("system", "be brief"), ("user", "hi")))
    assert opened.text == "<system>be brief<user>hi<assistant>"
    assert opened.token_ids == byte_tokenizer()(opened.text, add_special_tokens=False).input_ids
    closed = await prompts.tokenize_messages(conversation(("user", "hi"), add_generation_prompt=False))
    assert closed.text == "<user>hi"
    request = pb.GenerateRequest(messages=conversation(("user", "hi")))
    assert (
        await ids_of(prompts, request)
        == byte_tokenizer()("<user>hi<assistant>", add_special_tokens=False).input_ids
    )


async def test_what_the_template_refuses_is_a_violation_of_messages(prompts: Prompts) -> None:
    request = pb.GenerateRequest(messages=conversation(("wizard", "abracadabra")))
    assert "no wizards" in (await refusal(prompts, request))["messages"]


@pytest.mark.parametrize(
    ("request_", "field", "says"),
    [
        (pb.GenerateRequest(text="x" * 63), "text", "the prompt has 64 tokens"),
        (
            pb.GenerateRequest(messages=conversation(("user", "x" * 99))),
            "messages",
            "leaves room for at most 63",
        ),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 64)), "token_ids.ids", "64 tokens"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[999] * 64)), "token_ids.ids", "64 tokens"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids", "empty"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 257, 300])), "token_ids.ids[1]", "257 is outside"),
    ],
)
async def test_prompts_that_do_not_fit(
    prompts: Prompts, request_: pb.GenerateRequest, field: str, says: str
) -> None:
    found = await refusal(prompts, request_)
    assert list(found) == [field]
    assert says in found[field]


async def test_the_last_tokens_are_kept(prompts: Prompts) -> None:
    whole = byte_tokenizer()("a" * 100 + "bc").input_ids
    assert (
        await ids_of(prompts, pb.GenerateRequest(text="a" * 100 + "bc", truncate_prompt_tokens=3))
        == whole[-3:]
    )
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), truncate_prompt_tokens=2)
    assert await ids_of(prompts, request) == [2, 3]
    request.truncate_prompt_tokens = 5
    assert await ids_of(prompts, request) == [1, 2, 3]


async def test_a_text_that_cannot_fit_is_refused_by_its_size() -> None:
    class Untouched(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            raise AssertionError("tokenised")

    prompts = Prompts(Untouched(byte_tokenizer()), limits())
    request = pb.GenerateRequest(text="x" * 5_000_000)
    assert "the prompt has 5000000 bytes" in (await refusal(prompts, request))["text"]
    prompts.close()


def test_a_normalizer_may_shorten_a_text() -> None:
    plain, shortening = byte_tokenizer(), byte_tokenizer()
    shortening.backend_tokenizer.normalizer = normalizers.NFC()
    assert Tokenizer(shortening).max_token_bytes == 4 * Tokenizer(plain).max_token_bytes


def test_decoding_leaves_special_tokens_out_where_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hé", add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hé"
    assert tokenizer.decode(ids * 200, skip_special_tokens=True) == "hé" * 200
    assert tokenizer.decode(ids[:-1], skip_special_tokens=True) == "h\N{REPLACEMENT CHARACTER}"


def test_byte_fallback_tokens_are_known() -> None:
    assert Tokenizer(byte_tokenizer()).byte_fallback_ids == frozenset()
    rust = RustTokenizer(models.BPE(vocab={"a": 0, "<0x0A>": 1, "<0xFF>": 2, "<0xZZ>": 3}, merges=[]))
    assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust)).byte_fallback_ids == {1, 2}


async def test_detokenize(prompts: Prompts, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi", add_special_tokens=True)
    assert await prompts.detokenize(ids, skip_special_tokens=False) == "<s>hi"


def test_a_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.has_chat_template
    assert loaded.encode("hi", add_special_tokens=True) == byte_tokenizer()("hi").input_ids
    byte_tokenizer(template=None).save_pretrained(tmp_path / "plain")
    assert not Tokenizer.load(tmp_path / "plain").has_chat_template


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="tokenizer"):
        Tokenizer.load(tmp_path)
