"""Builds the data plane's request messages from Python arguments; shared by both clients."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from deltaplane.errors import InvalidArgumentError
from deltaplane.v1 import generation_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A prompt: text, token ids, or the messages of a chat as {"role": ..., "content": ...}."""


class GenerateOptions(TypedDict, total=False):
    """What a generation can be told besides its prompt. What is left out, or None, takes the server's
    default.

    Which model answers
        adapter: name of the adapter; the base model without one.
        adapter_version: exactly this version of it; its current one by default.
        adapters: several adapters whose deltas add up: names and weights, in [-16, 16] and not 0, or names
            alone, each of weight 1; excludes `adapter`.

    How the next token is drawn: penalties and biases first, then temperature, top_k, top_p, min_p
        temperature: 0 is greedy; at most 100; 1 by default.
        top_k: from this many of the likeliest tokens; 0, the default, means all.
        top_p: from the smallest set whose probability reaches this, in (0, 1]; 1 by default.
        min_p: from those with at least this share of the likeliest one's probability, in [0, 1]; 0 by
            default.
        repetition_penalty: in (0, 10]; 1 by default.
        presence_penalty, frequency_penalty: in [-2, 2]; 0 by default.
        logit_bias: token ids to values in [-100, 100] that are added to their logits.
        seed: makes the draw repeatable; output i uses seed + i.
        n: how many outputs; 1 by default.

    When an output ends
        max_tokens: the most tokens of one output; as many as the model's length leaves by default.
        min_tokens: end-of-sequence and stops count only from this many tokens on.
        stop: a text, or several, that ends the output.
        stop_token_ids: tokens that end the output.
        include_stop: whether the matched stop text stays in the output.
        ignore_eos: go on past the model's end-of-sequence tokens.

    What the stream carries
        logprobs: log-probabilities of each token and of this many of the likeliest ones; none by default.
        skip_special_tokens: leave special tokens out of the text; True by default.
        stream_interval: a message at least every this many tokens; 1 by default.
        omit_token_ids: leave token ids out of the messages.

    The request itself
        request_id: its name in logs and in abort(); the server makes one by default.
        truncate_prompt_tokens: keep only this many of the prompt's last tokens.
        add_generation_prompt: whether the chat template opens the assistant's turn; for chats only; True by
            default.
        priority: higher is scheduled first; 0 by default.
        tenant: the queue that it is counted in; its adapter's by default.
    """

    adapter: str | None
    adapter_version: int | None
    adapters: Mapping[str, float] | Sequence[str] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    n: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    logprobs: int | None
    skip_special_tokens: bool | None
    stream_interval: int | None
    omit_token_ids: bool | None
    request_id: str | None
    truncate_prompt_tokens: int | None
    add_generation_prompt: bool | None
    priority: int | None
    tenant: str | None


_OPTIONS = GenerateOptions.__optional_keys__


def generate(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Errors: InvalidArgumentError (a value does not fit its field), TypeError (no such option or prompt)."""
    for name in options.keys() - _OPTIONS:
        near = difflib.get_close_matches(name, _OPTIONS, n=1)
        raise TypeError(f"no such option: {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = generation_pb2.GenerateRequest()
    _fill(request.sampling, given, "sampling.")
    _fill(request.stop, given, "stop.")
    _fill(request.output, given, "output.")
    adapters = given.pop("adapters", ())
    plain = {name: value for name, value in given.items() if name not in _GROUPED}
    _fill(request, plain, "")
    _set_adapters(request, adapters)
    _set_prompt(request, prompt)
    if "add_generation_prompt" in given:
        if request.WhichOneof("prompt") != "messages":
            raise InvalidArgumentError.for_field(
                "messages.add_generation_prompt", "is for chats; give the prompt as messages, or leave it out"
            )
        request.messages.add_generation_prompt = given["add_generation_prompt"]
    return request


def tokenize(
    prompt: str | Sequence[Mapping[str, str]], add_special_tokens: bool | None
) -> generation_pb2.TokenizeRequest:
    """Errors: TypeError (the prompt is neither text nor messages)."""
    request = generation_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.messages.CopyFrom(_chat(prompt))
    return request


def detokenize(
    token_ids: Sequence[int], skip_special_tokens: bool | None
) -> generation_pb2.DetokenizeRequest:
    """Errors: InvalidArgumentError (an id does not fit its field)."""
    request = generation_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    _fill(request, {"token_ids": token_ids}, "")
    return request


def _set_adapters(
    request: generation_pb2.GenerateRequest, adapters: Mapping[str, float] | Sequence[str]
) -> None:
    if isinstance(adapters, str):
        raise InvalidArgumentError.for_field(
            "adapters", f"{adapters!r} is one name; give names and weights, a list of names, or `adapter`"
        )
    for name in adapters:
        weight = {"weight": adapters[name]} if isinstance(adapters, Mapping) else {}
        _fill(request.adapters.add(), {"adapter": name, **weight}, "adapters.")


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif any(isinstance(item, Mapping) for item in prompt):
        request.messages.CopyFrom(_chat(prompt))
    else:
        request.token_ids.SetInParent()
        _fill(request.token_ids, {"ids": prompt}, "token_ids.")


def _chat(messages: Sequence[Any]) -> generation_pb2.ChatMessages:
    chat = generation_pb2.ChatMessages()
    for message in messages:
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise TypeError(f'a chat message is {{"role": ..., "content": ...}}, not {message!r}')
        _fill(chat.messages.add(), message, "messages.")
    return chat


_GROUPED = frozenset(
    field.name
    for message in (generation_pb2.SamplingParams, generation_pb2.StopCondition, generation_pb2.OutputOptions)
    for field in message.DESCRIPTOR.fields
) | {"add_generation_prompt"}

_KINDS = {
    FieldDescriptor.TYPE_INT32: "a whole number from -2147483648 to 2147483647",
    FieldDescriptor.TYPE_UINT32: "a whole number from 0 to 4294967295",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 18446744073709551615",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text",
}


def _fill(message: Message, values: Mapping[str, Any], prefix: str) -> None:
    """Sets those fields of `message` that are in `values`; `prefix` is the message's path in the request."""
    for field in message.DESCRIPTOR.fields:
        if field.name in values:
            try:
                _assign(message, field, values[field.name])
            except (TypeError, ValueError) as error:
                raise InvalidArgumentError.for_field(
                    f"{prefix}{field.name}", f"{values[field.name]!r} is not {_kind(field)}"
                ) from error


def _assign(message: Message, field: Any, value: Any) -> None:
    if not field.is_repeated:
        setattr(message, field.name, value)
    elif field.message_type is not None:
        getattr(message, field.name).update(value)
    else:
        getattr(message, field.name).extend([value] if isinstance(value, str) else value)


def _kind(field: Any) -> str:
    if field.message_type is not None:
        key, value = field.message_type.fields
        return f"a mapping of {_KINDS[key.type]} to {_KINDS[value.type]}"
    return f"a list, each {_KINDS[field.type]}" if field.is_repeated else _KINDS[field.type]
