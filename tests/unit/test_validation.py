"""Every bound of generation.proto: what is refused, what is taken, and what the answer says."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.dataplane import validation
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.dataplane.violations import Violations
from deltaplane_server.scheduling.sampling_params import SamplingParams

LIMITS = RequestLimits(
    vocab_size=100,
    max_model_len=64,
    kv_tokens=48,
    eos_token_ids=frozenset({2}),
    has_chat_template=True,
    max_adapters=3,
)
NAN, INF = float("nan"), float("inf")


def violations_of(
    request: pb.GenerateRequest, limits: RequestLimits = LIMITS, prompt_tokens: int = 4
) -> dict[str, str]:
    """Field to description of everything that is wrong with a request."""
    found = Violations()
    validation.check_request_id(request.request_id, found)
    validation.check_routing(request, limits, found)
    validation.check_prompt(request, limits, found)
    validation.check_truncation(request, found)
    validation.check_sampling(request.sampling, request.output, limits, found)
    validation.check_num_outputs(request.sampling, limits, found)
    validation.check_stream_interval(request.output, found)
    validation.check_stop(request.stop, prompt_tokens, limits, found)
    try:
        found.raise_if_any()
    except InvalidArgumentError as error:
        return {violation.field: violation.description for violation in error.violations}
    return {}


def good(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"request_id": "r", "text": "hi", **fields})  # type: ignore[arg-type]


def composition(*terms: tuple[str, float | None]) -> pb.GenerateRequest:
    return good(adapters=[pb.WeightedAdapter(adapter=name, weight=weight) for name, weight in terms])


def sampling(**fields: object) -> pb.GenerateRequest:
    return good(sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> pb.GenerateRequest:
    return good(stop=pb.StopCondition(**fields))  # type: ignore[arg-type]


def messages(*turns: tuple[str, str]) -> pb.GenerateRequest:
    conversation = pb.ChatMessages(
        messages=[pb.ChatMessage(role=role, content=content) for role, content in turns]
    )
    return pb.GenerateRequest(request_id="r", messages=conversation)


BAD: list[tuple[pb.GenerateRequest, str, str]] = [
    (good(request_id="a b"), "request_id", "128"),
    (good(request_id="x" * 129), "request_id", "128"),
    (good(request_id=""), "request_id", "128"),
    (good(adapter="x" * 129), "adapter", "128"),
    (good(tenant="x" * 129), "tenant", "128"),
    (good(adapter="a", adapters=[pb.WeightedAdapter(adapter="b")]), "adapters", "one of the two"),
    (good(adapter_version=3), "adapter_version", "adapter"),
    (composition(*[(name, 1.0) for name in "abcd"]), "adapters", "4 are above the limit of 3"),
    (composition(("a", 1.0), ("", 1.0)), "adapters[1].adapter", "empty"),
    (composition(("a", 1.0), ("x" * 129, 1.0)), "adapters[1].adapter", "128"),
    (composition(("a", 1.0), ("b", 1.0), ("a", 0.5)), "adapters[2].adapter", "'a' is given twice"),
    (composition(("a", 0.0)), "adapters[0].weight", "not 0; got 0"),
    (composition(("a", -0.0)), "adapters[0].weight", "not 0"),
    (composition(("a", 16.01)), "adapters[0].weight", "[-16, 16]"),
    (composition(("a", -17.0)), "adapters[0].weight", "[-16, 16]"),
    (composition(("a", NAN)), "adapters[0].weight", "nan"),
    (composition(("a", 1.0), ("b", INF)), "adapters[1].weight", "inf"),
    (composition(("a", -INF)), "adapters[0].weight", "-inf"),
    (good(truncate_prompt_tokens=0), "truncate_prompt_tokens", "at least 1"),
    (pb.GenerateRequest(request_id="r"), "prompt", "messages, text, token_ids"),
    (good(text=""), "text", "empty"),
    (messages(), "messages.messages", "empty"),
    (messages(*[("", "")] * 1025), "messages.messages", "1025 are above the limit of 1024"),
    (messages(("", "x")), "messages.messages[0].role", "user"),
    (messages(("user", "x"), ("us er", "x")), "messages.messages[1].role", "us er"),
    (messages(("user", "")), "messages.messages[0].content", "empty"),
    (sampling(temperature=-0.5), "sampling.temperature", "[0, 100]; got -0.5"),
    (sampling(temperature=100.5), "sampling.temperature", "100.5"),
    (sampling(temperature=NAN), "sampling.temperature", "nan"),
    (sampling(temperature=INF), "sampling.temperature", "inf"),
    (sampling(top_p=0.0), "sampling.top_p", "(0, 1]; got 0"),
    (sampling(top_p=1.5), "sampling.top_p", "1.5"),
    (sampling(top_p=NAN), "sampling.top_p", "nan"),
    (sampling(min_p=-0.25), "sampling.min_p", "[0, 1]; got -0.25"),
    (sampling(min_p=1.25), "sampling.min_p", "1.25"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", "(0, 10]"),
    (sampling(repetition_penalty=10.5), "sampling.repetition_penalty", "10.5"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty", "[-2, 2]"),
    (sampling(presence_penalty=NAN), "sampling.presence_penalty", "nan"),
    (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty", "-2.5"),
    (sampling(logit_bias={100: 1.0}), "sampling.logit_bias[100]", "below 100"),
    (sampling(logit_bias={7: 101.0}), "sampling.logit_bias[7]", "101"),
    (sampling(logit_bias={7: NAN}), "sampling.logit_bias[7]", "nan"),
    (sampling(logit_bias={7: -INF}), "sampling.logit_bias[7]", "-inf"),
    (sampling(n=0), "sampling.n", "from 1 to 16; got 0"),
    (sampling(n=17), "sampling.n", "17"),
    (stop(max_tokens=0), "stop.max_tokens", "at least 1"),
    (stop(max_tokens=3, min_tokens=4), "stop.min_tokens", "4 is above max_tokens, 3"),
    (stop(min_tokens=45), "stop.min_tokens", "45 is above the tokens that the prompt leaves room for, 44"),
    (stop(max_tokens=60, min_tokens=50), "stop.min_tokens", "44"),
    (stop(stop=["x"] * 17), "stop.stop", "16"),
    (stop(stop=["ok", ""]), "stop.stop[1]", "empty"),
    (stop(stop=["x" * 257]), "stop.stop[0]", "256"),
    (stop(stop_token_ids=[5, 100]), "stop.stop_token_ids[1]", "100 is outside the vocabulary"),
    (good(output=pb.OutputOptions(logprobs=21)), "output.logprobs", "20"),
    (good(output=pb.OutputOptions(stream_interval=0)), "output.stream_interval", "at least 1"),
]


@pytest.mark.parametrize(
    ("request_", "field", "says"), BAD, ids=[f"{field}-{says}" for _, field, says in BAD]
)
def test_a_bad_field_is_named_with_its_value_and_limit(
    request_: pb.GenerateRequest, field: str, says: str
) -> None:
    found = violations_of(request_)
    assert list(found) == [field]
    assert says in found[field]


GOOD: list[pb.GenerateRequest] = [
    good(),
    good(request_id="a.b_c:d/e-f" + "x" * 117),
    good(adapter="a", adapter_version=1, tenant="t", priority=-5),
    composition(("a", None)),
    composition(("a", 16.0), ("b", -16.0), ("c", 1e-30)),
    pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=[0, 99])),
    messages(("system", "be brief"), ("user", "hi")),
    messages(*[("user", "hi")] * 1024),
    sampling(temperature=0.0, top_k=1000, top_p=1.0, min_p=0.0, n=16, seed=2**64 - 1),
    sampling(
        temperature=100.0, min_p=1.0, repetition_penalty=10.0, presence_penalty=-2.0, frequency_penalty=2.0
    ),
    sampling(logit_bias={0: -100.0, 99: 100.0}),
    stop(max_tokens=1, min_tokens=1, stop=["x" * 256] * 16, stop_token_ids=[0, 99]),
    good(output=pb.OutputOptions(logprobs=0, stream_interval=100)),
    good(output=pb.OutputOptions(logprobs=20)),
]


@pytest.mark.parametrize("request_", GOOD)
def test_values_at_their_limits_are_taken(request_: pb.GenerateRequest) -> None:
    assert violations_of(request_) == {}


def test_all_mistakes_come_in_one_answer() -> None:
    request = pb.GenerateRequest(
        request_id="r",
        sampling=pb.SamplingParams(temperature=-1, top_p=2),
        stop=pb.StopCondition(max_tokens=0, stop=[""]),
    )
    assert set(violations_of(request)) == {
        "prompt",
        "sampling.temperature",
        "sampling.top_p",
        "stop.max_tokens",
        "stop.stop[0]",
    }


def test_the_message_is_short_however_many_mistakes() -> None:
    found = Violations()
    for index in range(500):
        found.add(f"field[{index}]", "is wrong")
    with pytest.raises(InvalidArgumentError) as caught:
        found.raise_if_any()
    assert len(caught.value.message) < 200
    assert "and 497 more" in caught.value.message


def test_messages_need_a_chat_template() -> None:
    limits = replace(LIMITS, has_chat_template=False)
    assert "no chat template" in violations_of(messages(("user", "hi")), limits)["messages"]


def test_weights_of_a_composition() -> None:
    request = composition(("b", None), ("a", -0.25))
    assert validation.check_routing(request, LIMITS, Violations()) == {"b": 1.0, "a": -0.25}
    assert validation.check_routing(good(adapter="a"), LIMITS, Violations()) == {}


def test_all_that_is_wrong_with_a_composition_is_told_at_once() -> None:
    request = composition(("", 0.0), ("b", NAN), ("b", 17.0))
    request.adapter_version = 1
    assert violations_of(request).keys() == {
        "adapter_version",
        "adapters[0].adapter",
        "adapters[0].weight",
        "adapters[1].weight",
        "adapters[2].adapter",
        "adapters[2].weight",
    }


@pytest.mark.parametrize(
    ("num_tokens", "limits", "says"),
    [
        (0, LIMITS, "at least one token"),
        (64, LIMITS, "the model's length of 64 leaves room for at most 63"),
        (48, LIMITS, "all KV pages together hold 48"),
        (47, LIMITS, None),
        (63, replace(LIMITS, kv_tokens=1000), None),
    ],
)
def test_prompt_lengths(num_tokens: int, limits: RequestLimits, says: str | None) -> None:
    found = Violations()
    validation.check_prompt_length("text", num_tokens, limits, found)
    assert bool(found) == (says is not None)
    if says is not None:
        with pytest.raises(InvalidArgumentError, match=says):
            found.raise_if_any()


def checked(check: Callable[[Violations], object]) -> object:
    found = Violations()
    value = check(found)
    found.raise_if_any()
    return value


def test_unset_sampling_fields_take_their_defaults() -> None:
    request = good()
    params = checked(lambda found: validation.check_sampling(request.sampling, request.output, LIMITS, found))
    assert params == SamplingParams()


def test_sampling_fields_are_taken_over() -> None:
    request = sampling(temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, seed=9, logit_bias={1: 2.0})
    request.output.logprobs = 2
    found = Violations()
    params = validation.check_sampling(request.sampling, request.output, LIMITS, found)
    assert params == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, seed=9, logit_bias={1: 2.0}, logprobs=2
    )
    assert not found


def test_max_tokens_is_what_the_prompt_leaves_room_for() -> None:
    found = Violations()
    assert validation.check_stop(pb.StopCondition(), 8, LIMITS, found).max_tokens == 40
    assert validation.check_stop(pb.StopCondition(max_tokens=1000), 8, LIMITS, found).max_tokens == 40
    assert validation.check_stop(pb.StopCondition(max_tokens=7), 8, LIMITS, found).max_tokens == 7
    assert not found


def test_ignore_eos_leaves_no_eos_tokens() -> None:
    found = Violations()
    assert validation.check_stop(pb.StopCondition(), 8, LIMITS, found).eos_token_ids == {2}
    assert (
        validation.check_stop(pb.StopCondition(ignore_eos=True), 8, LIMITS, found).eos_token_ids
        == frozenset()
    )
