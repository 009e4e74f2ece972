"""Checks the fields of a request against the limits of the model; every bound of generation.proto is here.

Checks add to one `Violations`, so that a client learns of all its mistakes at once. Values that they
return are sound only when nothing was added.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.dataplane.violations import Violations, shown
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_NAME_LENGTH = 128
_MAX_LOGIT_BIAS = 100.0
_MAX_WEIGHT = 16.0


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What an optional number may be; `low` itself is refused where `above_low` is set."""

    default: float
    low: float
    high: float
    above_low: bool = False

    def check(self, message: pb.SamplingParams, field: str, found: Violations) -> float:
        if not message.HasField(field):  # type: ignore[arg-type]  # a Literal in the stubs
            return self.default
        value: float = getattr(message, field)
        if not self.low <= value <= self.high or (self.above_low and value == self.low):
            bracket = "(" if self.above_low else "["
            found.add(f"sampling.{field}", f"must be in {bracket}{self.low:g}, {self.high:g}]; got {value:g}")
        return value


_SAMPLING_BOUNDS = {
    "temperature": _Bounds(1.0, 0.0, 100.0),
    "top_p": _Bounds(1.0, 0.0, 1.0, above_low=True),
    "min_p": _Bounds(0.0, 0.0, 1.0),
    "repetition_penalty": _Bounds(1.0, 0.0, 10.0, above_low=True),
    "presence_penalty": _Bounds(0.0, -2.0, 2.0),
    "frequency_penalty": _Bounds(0.0, -2.0, 2.0),
}


def check_request_id(request_id: str, found: Violations) -> None:
    """The name of a request, from its field or its metadata."""
    if _REQUEST_ID.fullmatch(request_id) is None:
        found.add("request_id", f"{shown(request_id)} must be 1 to 128 characters of A-Z, a-z, 0-9 and ._:/-")


def check_routing(
    request: pb.GenerateRequest, limits: RequestLimits, found: Violations
) -> Mapping[str, float]:
    """Who answers, and in whose queue. Answers the weights of a composition's adapters."""
    if request.adapter and request.adapters:
        found.add(
            "adapters", f"{len(request.adapters)} adapters are given beside `adapter`; set one of the two"
        )
    if request.HasField("adapter_version") and not request.adapter:
        found.add(
            "adapter_version",
            f"{request.adapter_version} needs `adapter`, which is empty; set it or leave both out",
        )
    for field, name in (("adapter", request.adapter), ("tenant", request.tenant)):
        if len(name) > _MAX_NAME_LENGTH:
            found.add(field, _too_long(name))
    return check_composition(request.adapters, limits, found)


def check_composition(
    adapters: Sequence[pb.WeightedAdapter], limits: RequestLimits, found: Violations
) -> dict[str, float]:
    """The adapters that are to be added up, and their weights; whether each can be is known to the control
    plane."""
    if len(adapters) > limits.max_adapters:
        found.add(
            "adapters",
            f"{len(adapters)} are above the limit of {limits.max_adapters}, the slots of this server "
            "(--max-loras); give fewer",
        )
        return {}
    weights: dict[str, float] = {}
    for index, term in enumerate(adapters):
        name, weight = term.adapter, term.weight if term.HasField("weight") else 1.0
        if not name:
            found.add(f"adapters[{index}].adapter", "is empty; name an adapter")
        elif len(name) > _MAX_NAME_LENGTH:
            found.add(f"adapters[{index}].adapter", _too_long(name))
        elif name in weights:
            found.add(f"adapters[{index}].adapter", f"{shown(name)} is given twice; add its weights up")
        if not 0 < abs(weight) <= _MAX_WEIGHT:
            found.add(
                f"adapters[{index}].weight",
                f"must be in [-{_MAX_WEIGHT:g}, {_MAX_WEIGHT:g}] and not 0; got {weight:g}",
            )
        weights[name] = weight
    return weights


def _too_long(name: str) -> str:
    return f"{shown(name)} is too long; a name has at most {_MAX_NAME_LENGTH} characters"


def check_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, limits: RequestLimits, found: Violations
) -> None:
    """The form of the prompt; its length is known only in tokens (see check_prompt_length)."""
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                found.add("text", "is empty; give at least one character")
        case "messages":
            check_messages(request.messages, limits, found)
        case None:
            forms = sorted(field.name for field in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
            found.add("prompt", f"is missing; set one of {', '.join(forms)}")
        case _:
            pass


def check_truncation(request: pb.GenerateRequest, found: Violations) -> None:
    """How much of the prompt is kept."""
    if request.HasField("truncate_prompt_tokens") and request.truncate_prompt_tokens == 0:
        found.add("truncate_prompt_tokens", "0 keeps nothing of the prompt; give at least 1, or leave it out")


def check_messages(messages: pb.ChatMessages, limits: RequestLimits, found: Violations) -> None:
    """A conversation, apart from what the model's template makes of it."""
    if not limits.has_chat_template:
        found.add("messages", "this model has no chat template; give the prompt as text or token_ids")
    if not messages.messages:
        found.add("messages.messages", "is empty; give at least one message")
    if (count := len(messages.messages)) > limits.max_messages:
        found.add("messages.messages", f"{count} are above the limit of {limits.max_messages}; give fewer")
        return
    for index, message in enumerate(messages.messages):
        at = f"messages.messages[{index}]"
        if _ROLE.fullmatch(message.role) is None:
            found.add(
                f"{at}.role",
                f'{shown(message.role)} is no role; use one such as "system", "user" or "assistant"',
            )
        if not message.content:
            found.add(f"{at}.content", "is empty; give the text of the turn, or leave the message out")


def check_token_ids(field: str, token_ids: Sequence[int], limits: RequestLimits, found: Violations) -> None:
    """Ids of the vocabulary. Names the first that is none."""
    if not token_ids or max(token_ids) < limits.vocab_size:
        return
    outside = [index for index, token in enumerate(token_ids) if token >= limits.vocab_size]
    others = f" ({len(outside)} ids are outside)" if len(outside) > 1 else ""
    found.add(
        f"{field}[{outside[0]}]",
        f"{token_ids[outside[0]]} is outside the vocabulary; ids are below {limits.vocab_size}{others}",
    )


def check_prompt_length(field: str, num_tokens: int, limits: RequestLimits, found: Violations) -> None:
    """A prompt must have a token, and leave room for one in the model and in the KV pages."""
    if num_tokens == 0:
        found.add(field, "is empty; give at least one token")
    elif num_tokens >= limits.max_model_len:
        found.add(
            field,
            f"the prompt has {num_tokens} tokens, and the model's length of {limits.max_model_len} leaves "
            f"room for at most {limits.max_model_len - 1}; shorten it or set truncate_prompt_tokens",
        )
    elif num_tokens > limits.max_prompt_tokens:
        found.add(
            field,
            f"the prompt has {num_tokens} tokens, and all KV pages together hold {limits.kv_tokens}, which "
            f"leaves room for at most {limits.max_prompt_tokens}; shorten it, set truncate_prompt_tokens, "
            "or start the server with more --kv-cache-memory",
        )


def check_sampling(
    sampling: pb.SamplingParams,
    output: pb.OutputOptions,
    limits: RequestLimits,
    found: Violations,
    default_seed: int | None = None,
) -> SamplingParams:
    """How tokens are drawn and which log-probabilities are reported; unset fields take their defaults."""
    logprobs = output.logprobs if output.HasField("logprobs") else None
    if logprobs is not None and logprobs > limits.max_logprobs:
        found.add("output.logprobs", f"{logprobs} is above the limit of {limits.max_logprobs}; ask for fewer")
    return SamplingParams(
        top_k=sampling.top_k,
        logit_bias=_check_logit_bias(sampling.logit_bias, limits, found),
        seed=sampling.seed if sampling.HasField("seed") else default_seed,
        logprobs=logprobs,
        **{field: bounds.check(sampling, field, found) for field, bounds in _SAMPLING_BOUNDS.items()},
    )


def check_num_outputs(sampling: pb.SamplingParams, limits: RequestLimits, found: Violations) -> int:
    """How many outputs are asked for."""
    num_outputs = sampling.n if sampling.HasField("n") else 1
    if not 1 <= num_outputs <= limits.max_outputs:
        found.add("sampling.n", f"must be from 1 to {limits.max_outputs}; got {num_outputs}")
    return num_outputs


def check_stream_interval(output: pb.OutputOptions, found: Violations) -> int:
    """Tokens of a message."""
    interval = output.stream_interval if output.HasField("stream_interval") else 1
    if interval < 1:
        found.add("output.stream_interval", "must be at least 1; got 0")
    return interval


def check_stop(
    stop: pb.StopCondition, num_prompt_tokens: int, limits: RequestLimits, found: Violations
) -> StopParams:
    """When an output ends: max_tokens is what was asked for, as far as the model's length leaves it."""
    room = max(1, limits.max_sequence_tokens - num_prompt_tokens)
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else room
    if max_tokens < 1:
        found.add("stop.max_tokens", "must be at least 1; got 0")
    elif stop.min_tokens > max_tokens:
        limit = "max_tokens" if stop.HasField("max_tokens") else "the tokens that the prompt leaves room for"
        found.add("stop.min_tokens", f"{stop.min_tokens} is above {limit}, {max_tokens}; lower it")
    elif stop.min_tokens > room:
        found.add(
            "stop.min_tokens",
            f"{stop.min_tokens} is above the {room} that the prompt leaves room for; lower it",
        )
    _check_stop_strings(stop.stop, limits, found)
    check_token_ids("stop.stop_token_ids", stop.stop_token_ids, limits, found)
    return StopParams(
        max_tokens=min(max_tokens, room),
        min_tokens=stop.min_tokens,
        stop=tuple(stop.stop),
        stop_token_ids=frozenset(stop.stop_token_ids),
        eos_token_ids=frozenset() if stop.ignore_eos else limits.eos_token_ids,
        include_stop=stop.include_stop,
    )


def _check_stop_strings(stops: Sequence[str], limits: RequestLimits, found: Violations) -> None:
    if len(stops) > limits.max_stop_strings:
        found.add(
            "stop.stop", f"{len(stops)} strings are above the limit of {limits.max_stop_strings}; give fewer"
        )
        return
    for index, text in enumerate(stops):
        if not text:
            found.add(f"stop.stop[{index}]", "is empty; leave it out")
        elif len(text) > limits.max_stop_string_length:
            found.add(
                f"stop.stop[{index}]",
                f"has {len(text)} characters, above the limit of {limits.max_stop_string_length}; shorten it",
            )


def _check_logit_bias(
    biases: Mapping[int, float], limits: RequestLimits, found: Violations
) -> dict[int, float]:
    if outside := [token for token in biases if token >= limits.vocab_size]:
        found.add(
            f"sampling.logit_bias[{min(outside)}]",
            f"the token is outside the vocabulary; ids are below {limits.vocab_size}",
        )
    if beyond := [token for token, bias in biases.items() if not abs(bias) <= _MAX_LOGIT_BIAS]:
        found.add(
            f"sampling.logit_bias[{min(beyond)}]",
            f"must be in [-{_MAX_LOGIT_BIAS:g}, {_MAX_LOGIT_BIAS:g}]; got {biases[min(beyond)]:g}",
        )
    return dict(biases)
