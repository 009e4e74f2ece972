"""Requests as the client builds them from Python arguments."""

import inspect

import pytest

from deltaplane import (
    AdapterClient,
    AsyncAdapterClient,
    AsyncClient,
    AsyncOperationClient,
    Client,
    OperationClient,
    adapter_requests,
    requests,
)
from deltaplane.errors import InvalidArgumentError
from deltaplane.requests import GenerateOptions
from deltaplane.v1 import adapters_pb2, generation_pb2

EVERY_OPTION: GenerateOptions = {
    "adapter": "legal",
    "adapter_version": 3,
    "adapters": {"legal": 0.5, "story": 2.0},
    "temperature": 0.0,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {7: -100.0},
    "seed": 2**64 - 1,
    "n": 2,
    "max_tokens": 9,
    "min_tokens": 1,
    "stop": ["\n", "END"],
    "stop_token_ids": [1, 2],
    "include_stop": True,
    "ignore_eos": True,
    "logprobs": 0,
    "skip_special_tokens": False,
    "stream_interval": 4,
    "omit_token_ids": True,
    "request_id": "r-1",
    "truncate_prompt_tokens": 100,
    "add_generation_prompt": False,
    "priority": -1,
    "tenant": "acme",
}


def test_every_option_lands_in_its_field() -> None:
    request = requests.generate([{"role": "user", "content": "Hi"}], EVERY_OPTION)
    assert request.adapter == "legal"
    assert request.adapter_version == 3
    assert {term.adapter: term.weight for term in request.adapters} == {"legal": 0.5, "story": 2.0}
    assert (request.sampling.seed, request.sampling.top_k, request.sampling.min_p) == (2**64 - 1, 5, 0.25)
    assert request.sampling.HasField("temperature")
    assert dict(request.sampling.logit_bias) == {7: -100.0}
    assert list(request.stop.stop) == ["\n", "END"]
    assert list(request.stop.stop_token_ids) == [1, 2]
    assert request.output.HasField("logprobs")
    assert request.output.skip_special_tokens is False
    assert request.messages.add_generation_prompt is False
    assert (request.priority, request.tenant, request.request_id) == (-1, "acme", "r-1")
    assert request.truncate_prompt_tokens == 100


def test_there_is_an_option_for_every_field_of_the_wire() -> None:
    groups = ("SamplingParams", "StopCondition", "OutputOptions")
    fields = {
        field.name
        for group in groups
        for field in generation_pb2.DESCRIPTOR.message_types_by_name[group].fields
    }
    top = {field.name for field in generation_pb2.GenerateRequest.DESCRIPTOR.fields}
    top -= {"text", "token_ids", "messages", "sampling", "stop", "output"}
    chat = {field.name for field in generation_pb2.ChatMessages.DESCRIPTOR.fields} - {"messages"}
    assert fields | top | chat == set(EVERY_OPTION) == set(GenerateOptions.__optional_keys__)


def test_what_is_left_out_or_none_stays_unset() -> None:
    request = requests.generate("Hi", {"temperature": None, "stop": None})
    assert request == generation_pb2.GenerateRequest(text="Hi")
    assert not request.sampling.HasField("temperature")


def test_prompts_take_three_forms() -> None:
    assert requests.generate("Hi", {}).text == "Hi"
    assert list(requests.generate([1, 2], {}).token_ids.ids) == [1, 2]
    assert requests.generate([], {}).WhichOneof("prompt") == "token_ids"
    chat = requests.generate([{"role": "user", "content": "Hi"}], {}).messages
    assert [(message.role, message.content) for message in chat.messages] == [("user", "Hi")]
    assert not chat.HasField("add_generation_prompt")


def test_adapters_without_weights_are_a_list() -> None:
    request = requests.generate("Hi", {"adapters": ["legal", "story"]})
    assert [term.adapter for term in request.adapters] == ["legal", "story"]
    assert not any(term.HasField("weight") for term in request.adapters)


def test_one_stop_text_needs_no_list() -> None:
    assert list(requests.generate("Hi", {"stop": "END"}).stop.stop) == ["END"]


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        ({"top_k": -1}, "sampling.top_k", "-1 is not a whole number from 0 to 4294967295"),
        ({"max_tokens": 2.5}, "stop.max_tokens", "2.5 is not a whole number"),
        ({"temperature": "hot"}, "sampling.temperature", "'hot' is not a number"),
        ({"stop_token_ids": [1, -2]}, "stop.stop_token_ids", "[1, -2] is not a list, each a whole number"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias", "is not a mapping of a whole number"),
        ({"adapters": {"a": "much"}}, "adapters.weight", "'much' is not a number"),
        ({"adapters": "legal"}, "adapters", "'legal' is one name"),
        ({"adapters": [1]}, "adapters.adapter", "1 is not text"),
        ({"priority": 2**31}, "priority", "is not a whole number from -2147483648"),
        ({"add_generation_prompt": True}, "messages.add_generation_prompt", "give the prompt as messages"),
    ],
)
def test_a_value_that_fits_no_field_is_refused_by_name(
    options: GenerateOptions, field: str, told: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        requests.generate("Hi", options)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert told in violation.description
    assert str(caught.value) == f"{field}: {violation.description}"


def test_an_unknown_option_is_told_with_its_neighbour() -> None:
    with pytest.raises(TypeError, match="no such option: 'max_token'; did you mean 'max_tokens'"):
        requests.generate("Hi", {"max_token": 5})  # type: ignore[typeddict-unknown-key]


def test_a_chat_message_has_a_role_and_a_content() -> None:
    with pytest.raises(TypeError, match="a chat message is"):
        requests.generate([{"role": "user"}], {})
    with pytest.raises(TypeError, match="a chat message is"):
        requests.tokenize([{"role": "user", "text": "Hi"}], None)


def test_an_update_names_what_it_changes() -> None:
    def mask(source: str | None, labels: dict[str, str] | None) -> list[str]:
        request = adapter_requests.update_adapter(
            "a",
            source=source,
            labels=labels,
            etag="",
            expected_digest="",
            validate_only=False,
            keep_previous=False,
            idempotency_key="",
        )
        return list(request.update_mask.paths)

    assert mask("/a", None) == ["source"]
    assert mask(None, {}) == ["labels"]
    assert mask("/a", {"team": "x"}) == ["source", "labels"]


def test_a_drain_timeout_is_in_seconds_and_zero_is_not_the_default() -> None:
    def request(drain_timeout: float | None) -> adapters_pb2.DeleteAdapterRequest:
        return adapter_requests.delete_adapter(
            "a", etag="", drain_timeout=drain_timeout, force=False, allow_missing=False
        )

    assert not request(None).HasField("drain_timeout")
    assert request(0).HasField("drain_timeout")
    assert request(1.5).drain_timeout.ToMilliseconds() == 1500


def test_tiers_have_names() -> None:
    assert adapter_requests.tier(None) == adapters_pb2.ADAPTER_TIER_UNSPECIFIED
    assert adapter_requests.tier("host") == adapters_pb2.ADAPTER_TIER_HOST
    with pytest.raises(InvalidArgumentError, match="'gpu' is no tier; use 'device' or 'host'"):
        adapter_requests.tier("gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [
        (Client, AsyncClient),
        (AdapterClient, AsyncAdapterClient),
        (OperationClient, AsyncOperationClient),
    ],
)
def test_both_clients_have_the_same_methods(blocking: type, asynchronous: type) -> None:
    def methods(cls: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(method).replace(return_annotation=None)).replace(
                ".blocking.", ".aio."
            )
            for name, method in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert methods(blocking) == methods(asynchronous)
