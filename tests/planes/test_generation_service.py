"""The data plane over real gRPC: a whole server, on a backend without tensors."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import capture_logs

from byte_tokenizer import byte_tokenizer
from deltaplane.v1 import generation_pb2 as pb
from deltaplane.v1.generation_pb2_grpc import GenerationServiceStub
from deltaplane_server.app import running_server
from deltaplane_server.config import LoraModule
from deltaplane_server.scheduling.lease import AdapterUid
from deltaplane_server.server import Server
from fake_backend import FakeBackend, server_config
from fake_runner import expected_tokens
from fakes import write_adapter

HELLO: list[int] = byte_tokenizer()("hello").input_ids


@dataclass(slots=True)
class Serving:
    """stub: of the data plane. channel: to it."""

    server: Server
    backend: FakeBackend
    channel: grpc.aio.Channel
    stub: Any
    http_port: int

    async def idle(self) -> None:
        """Waits until nothing is held any more, which takes a step, and checks all books."""
        stats = self.server.engine.stats
        await eventually(lambda: stats().num_running + stats().num_waiting == 0)
        await eventually(lambda: stats().kv_pages_free == stats().kv_pages_total)
        await eventually(lambda: all(slot.leases == 0 for slot in self.server.manager.slots()))
        self.server.manager.check_integrity()
        assert self.backend.runner.num_remembered == 0


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    assert holds()


@asynccontextmanager
async def serving(backend: FakeBackend | None = None, **config: Any) -> AsyncIterator[Serving]:
    backend = backend or FakeBackend()
    async with (
        running_server(server_config(**config), backend) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.ports.port}") as channel,
    ):
        stub = GenerationServiceStub(channel)
        yield Serving(running.server, backend, channel, stub, running.ports.http_port)
        backend.runner.gate.set()


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with two adapters, `legal` and `story`."""
    modules = tuple(
        LoraModule(name, str(write_adapter(tmp_path / name, content=name))) for name in ("legal", "story")
    )
    async with serving(lora_modules=modules) as plane:
        yield plane


def request(text: str = "hello", *, max_tokens: int = 5, **fields: Any) -> pb.GenerateRequest:
    """A greedy request."""
    sampling = pb.SamplingParams(temperature=0)
    stop = pb.StopCondition(max_tokens=max_tokens)
    return pb.GenerateRequest(**{"text": text, "sampling": sampling, "stop": stop, **fields})


def composition(weights: Mapping[str, float], **fields: Any) -> pb.GenerateRequest:
    """A greedy request to several adapters."""
    terms = [pb.WeightedAdapter(adapter=name, weight=weight) for name, weight in weights.items()]
    return request(adapters=terms, **fields)


async def collected(call: Any) -> list[pb.GenerateResponse]:
    responses: list[pb.GenerateResponse] = []
    await collect(call, responses)
    return responses


async def collect(call: Any, responses: list[pb.GenerateResponse]) -> None:
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failed call: its code, reason, fields and whether its headers were sent."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: dict[str, str]
    retry_after_s: float | None
    had_headers: bool
    responses: list[pb.GenerateResponse]


async def refused(call: Any) -> Refusal:
    responses: list[pb.GenerateResponse] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call, responses)
    error = caught.value
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for detail in status.details:
        for message in (info, bad, retry):
            detail.Unpack(message)
    return Refusal(
        code=error.code(),
        message=error.details() or "",
        reason=info.reason,
        fields={violation.field: violation.description for violation in bad.field_violations},
        retry_after_s=retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        if retry.HasField("retry_delay")
        else None,
        had_headers="x-request-id" in dict(error.initial_metadata() or ()),
        responses=responses,
    )


def tokens_of(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [token for response in responses if response.output_index == index for token in response.token_ids]


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(response.text for response in responses if response.output_index == index)


async def test_a_stream_is_deltas_one_finish_and_usage_at_the_end(plane: Serving) -> None:
    responses = await collected(plane.stub.Generate(request(request_id="r1")))
    expected = expected_tokens(0, HELLO, 5)
    assert tokens_of(responses) == expected
    assert text_of(responses) == byte_tokenizer().decode(expected, skip_special_tokens=True)
    assert {response.request_id for response in responses} == {"r1"}
    assert [response.HasField("finish") for response in responses[:-1]] == [False] * (len(responses) - 1)
    assert responses[-1].finish.reason == pb.FINISH_REASON_LENGTH
    assert [response.HasField("usage") for response in responses[:-1]] == [False] * (len(responses) - 1)
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.adapter) == (len(HELLO), 5, "")
    await plane.idle()


async def test_the_three_forms_of_a_prompt(plane: Serving) -> None:
    by_text = await collected(plane.stub.Generate(request()))
    ids = pb.TokenIds(ids=HELLO)
    stop, sampling = pb.StopCondition(max_tokens=5), pb.SamplingParams(temperature=0)
    by_ids = await collected(
        plane.stub.Generate(pb.GenerateRequest(token_ids=ids, stop=stop, sampling=sampling))
    )
    assert tokens_of(by_ids) == tokens_of(by_text)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    by_chat = await collected(
        plane.stub.Generate(pb.GenerateRequest(messages=chat, stop=stop, sampling=sampling))
    )
    prompt = byte_tokenizer()("<user>hi<assistant>", add_special_tokens=False).input_ids
    assert tokens_of(by_chat) == expected_tokens(0, prompt, 5)


async def test_each_adapter_and_the_base_answer_for_themselves(plane: Serving) -> None:
    names = ("", "legal", "story")
    streams = [collected(plane.stub.Generate(request(adapter=name))) for name in names]
    answers = await asyncio.gather(*streams)
    assert len({tuple(tokens_of(answer)) for answer in answers}) == 3
    assert tokens_of(answers[0]) == expected_tokens(0, HELLO, 5)
    for name, answer in zip(names, answers, strict=True):
        usage = answer[-1].usage
        assert (usage.adapter, usage.adapter_version) == (name, 1 if name else 0)
        assert usage.adapter_hit
    await plane.idle()


async def test_a_composition_answers_beside_its_adapters(plane: Serving) -> None:
    """The fake model draws by (uid, weight) of each, in order of uid: `legal` is 1 and `story` is 2."""
    asks: dict[AdapterUid, pb.GenerateRequest] = {
        ((1, 0.5), (2, -0.25)): composition({"story": -0.25, "legal": 0.5}),
        ((1, 1.0), (2, 1.0)): composition({"legal": 1.0, "story": 1.0}),
        ((2, 3.0),): composition({"story": 3.0}),
        1: composition({"legal": 1.0}),
        2: request(adapter="story"),
        0: request(),
    }
    answers = await asyncio.gather(*(collected(plane.stub.Generate(ask)) for ask in asks.values()))
    for uid, answer in zip(asks, answers, strict=True):
        assert tokens_of(answer) == expected_tokens(uid, HELLO, 5)
    usage = answers[0][-1].usage
    assert (usage.adapter, usage.adapter_version, usage.adapter_hit) == ("legal+story", 0, True)
    assert list(usage.adapters) == [
        pb.AdapterUsage(adapter="legal", version=1, weight=0.5, hit=True),
        pb.AdapterUsage(adapter="story", version=1, weight=-0.25, hit=True),
    ]
    assert list(answers[3][-1].usage.adapters) == [
        pb.AdapterUsage(adapter="legal", version=1, weight=1, hit=True)
    ]
    assert (answers[3][-1].usage.adapter, answers[3][-1].usage.adapter_version) == ("legal", 1)
    assert not answers[-1][-1].usage.adapters
    await plane.idle()


async def test_headers_and_log_name_all_of_a_composition(plane: Serving) -> None:
    with capture_logs() as logs:
        call = plane.stub.Generate(composition({"story": 0.5, "legal": 2.0}, request_id="r1"))
        await collected(call)
        await plane.idle()
    assert dict(await call.initial_metadata())["x-adapter-version"] == "1,1"
    [line] = [line for line in logs if line["event"] == "request"]
    assert (line["adapter"], line["adapters"]) == ("legal+story", ["legal@1 * 2", "story@1 * 0.5"])


async def test_several_outputs_of_a_composition(plane: Serving) -> None:
    sampling = pb.SamplingParams(temperature=0, n=3)
    ask = composition({"legal": 0.5, "story": 0.5}, sampling=sampling)
    responses = await collected(plane.stub.Generate(ask))
    expected = expected_tokens(((1, 0.5), (2, 0.5)), HELLO, 5)
    assert [tokens_of(responses, index) for index in range(3)] == [expected] * 3
    await plane.idle()


async def test_a_composition_ends_with_its_call(plane: Serving) -> None:
    plane.backend.runner.gate.clear()
    call = plane.stub.Generate(composition({"legal": 0.5, "story": 0.5}, max_tokens=200))
    await eventually(lambda: plane.server.engine.stats().num_running == 1)
    assert [slot.leases for slot in plane.server.manager.slots()] == [1, 1]
    call.cancel()
    plane.backend.runner.gate.set()
    await plane.idle()


async def test_a_failed_member_of_a_composition_is_named(plane: Serving, tmp_path: Path) -> None:
    """Both slots are taken, so that `late` is loaded for the request."""
    write_adapter(tmp_path / "late", content="late")
    plane.server.manager.register_trusted("late", str(tmp_path / "late"))
    write_adapter(tmp_path / "late", content="changed behind our back")
    for _ in range(2):  # found by the load, then known
        refusal = await refused(plane.stub.Generate(composition({"legal": 0.5, "late": 0.5})))
        assert refusal.code.name == "FAILED_PRECONDITION"
        assert refusal.reason == "ADAPTER_LOAD_FAILED"
        assert "late@1" in refusal.message
        assert not refusal.had_headers
    await plane.idle()


async def test_what_cannot_be_added_up_is_refused(plane: Serving, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "dora", content="dora", features=("dora",))
    plane.server.manager.register_trusted("dora", str(folder))
    refusal = await refused(plane.stub.Generate(composition({"legal": 0.5, "dora": 0.5})))
    assert (refusal.code.name, refusal.reason) == ("FAILED_PRECONDITION", "ADAPTER_NOT_COMPOSABLE")
    assert "dora@1 has dora" in refusal.message
    assert not refusal.had_headers
    assert tokens_of(await collected(plane.stub.Generate(request(adapter="dora")))) != []
    await plane.idle()


async def test_the_model_card_tells_the_limits_of_a_composition(plane: Serving) -> None:
    model = await plane.stub.GetModel(pb.GetModelRequest())
    assert (model.max_loras, model.max_composition_rows) == (2, 64)


async def test_headers_tell_request_and_version(plane: Serving) -> None:
    call = plane.stub.Generate(request(request_id="r1", adapter="legal"))
    await collected(call)
    headers = dict(await call.initial_metadata())
    assert (headers["x-request-id"], headers["x-adapter-version"]) == ("r1", "1")
    call = plane.stub.Generate(request())
    [response, *_] = await collected(call)
    headers = dict(await call.initial_metadata())
    assert headers["x-request-id"] == response.request_id != ""
    assert "x-adapter-version" not in headers


@pytest.mark.parametrize(
    ("metadata", "fields", "request_id", "adapter"),
    [
        ((("x-request-id", "from-metadata"),), {}, "from-metadata", ""),
        ((("x-request-id", "from-metadata"),), {"request_id": "own"}, "own", ""),
        ((("x-llm-d-model-name-rewrite", "legal"),), {}, None, "legal"),
        ((("multiplexed_model_id", "story"),), {}, None, "story"),
        ((("multiplexed_model_id", "story"), ("x-llm-d-model-name-rewrite", "legal")), {}, None, "legal"),
        ((("multiplexed_model_id", "story"),), {"adapter": "legal"}, None, "legal"),
        ((("x-llm-d-model-name-rewrite", "base"),), {}, None, ""),
    ],
)
async def test_metadata_names_what_fields_leave_empty(
    plane: Serving,
    metadata: tuple[tuple[str, str], ...],
    fields: dict[str, Any],
    request_id: str | None,
    adapter: str,
) -> None:
    responses = await collected(plane.stub.Generate(request(**fields), metadata=metadata))
    assert responses[-1].usage.adapter == adapter
    if request_id is not None:
        assert responses[0].request_id == request_id


async def test_several_outputs_of_one_prompt(plane: Serving) -> None:
    sampling = pb.SamplingParams(temperature=0, n=3)
    responses = await collected(plane.stub.Generate(request(adapter="legal", sampling=sampling)))
    finished = [response.output_index for response in responses if response.HasField("finish")]
    assert sorted(finished) == [0, 1, 2]
    assert all(len(tokens_of(responses, index)) == 5 for index in range(3))
    assert [r.HasField("usage") for r in responses].count(True) == 1
    assert responses[-1].usage.completion_tokens == 15
    await plane.idle()


async def test_what_comes_while_the_event_loop_is_busy_is_merged(plane: Serving) -> None:
    def keep_the_loop_busy() -> None:
        while plane.server.engine.stats().num_running:
            time.sleep(0.001)

    plane.backend.runner.gate.clear()
    call = plane.stub.Generate(request(max_tokens=200, adapter="legal"))
    await eventually(lambda: plane.server.engine.stats().num_running == 1)
    plane.backend.runner.gate.set()
    keep_the_loop_busy()
    responses = await collected(call)
    assert len(responses) <= 2, "the last delta may still have been on its way"
    assert len(tokens_of(responses)) == 200
    assert text_of(responses) == byte_tokenizer().decode(tokens_of(responses), skip_special_tokens=True)
    assert responses[-1].HasField("finish")
    assert responses[-1].HasField("usage")


async def test_what_the_stream_carries_is_chosen(plane: Serving) -> None:
    output = pb.OutputOptions(omit_token_ids=True, logprobs=2, stream_interval=5)
    responses = await collected(plane.stub.Generate(request(output=output)))
    assert len(responses) <= 2
    assert tokens_of(responses) == []
    tokens = expected_tokens(0, HELLO, 5)
    logprobs = [item for response in responses for item in response.logprobs]
    assert [item.token_id for item in logprobs] == tokens
    assert [item.logprob for item in logprobs] == [-0.5] * 5
    assert [(top.token_id, top.logprob) for top in logprobs[0].top] == [
        (tokens[0], -0.5),
        (tokens[0] + 1, -1.5),
    ]


async def test_a_stop_string_and_a_stop_token_are_named(plane: Serving) -> None:
    tokens = expected_tokens(0, HELLO, 5)
    text = byte_tokenizer().decode(tokens[:3])
    by_text = await collected(
        plane.stub.Generate(request(stop=pb.StopCondition(max_tokens=5, stop=[text[-1]])))
    )
    assert by_text[-1].finish.reason == pb.FINISH_REASON_STOP
    assert by_text[-1].finish.stop == text[-1]
    condition = pb.StopCondition(max_tokens=5, stop_token_ids=[tokens[0]])
    by_token = await collected(plane.stub.Generate(request(stop=condition)))
    assert by_token[-1].finish.stop_token_id == tokens[0]
    assert by_token[-1].finish.WhichOneof("matched") == "stop_token_id"


async def test_all_bad_fields_come_in_one_answer_before_headers(plane: Serving) -> None:
    bad = pb.GenerateRequest(
        text="",
        request_id="not an id",
        sampling=pb.SamplingParams(temperature=-1, top_p=0, logit_bias={999: 1.0}),
        stop=pb.StopCondition(max_tokens=0),
    )
    refusal = await refused(plane.stub.Generate(bad))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert set(refusal.fields) == {
        "text",
        "request_id",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.logit_bias[999]",
        "stop.max_tokens",
    }
    assert not refusal.had_headers
    await plane.idle()


@pytest.mark.parametrize(
    ("bad", "code", "reason", "names"),
    [
        (request(adapter="nobody"), "NOT_FOUND", "", "nobody"),
        (request(adapter="legal", adapter_version=7), "NOT_FOUND", "", "7"),
        (composition({"legal": 1.0, "nobody": 1.0}), "NOT_FOUND", "ADAPTER_NOT_FOUND", "'nobody'"),
        (composition({"legal": 1.0, "story": 0.0}), "INVALID_ARGUMENT", "", "adapters[1].weight"),
        (composition({"a": 1.0, "b": 1.0, "c": 1.0}), "INVALID_ARGUMENT", "", "above the limit of 2"),
        (request("x" * 300), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "301 tokens"),
        (request("x" * 5_000_000), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "5000000 bytes"),
    ],
)
async def test_refusals_come_before_headers(
    plane: Serving, bad: pb.GenerateRequest, code: str, reason: str, names: str
) -> None:
    refusal = await refused(plane.stub.Generate(bad))
    assert refusal.code.name == code
    assert names in refusal.message
    assert refusal.reason == reason or not reason
    assert not refusal.had_headers
    await plane.idle()


async def test_a_prompt_longer_than_all_pages_is_refused_at_once() -> None:
    async with serving(FakeBackend(num_pages=4)) as plane:
        refusal = await refused(plane.stub.Generate(request("x" * 100)))
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "all KV pages together hold 64" in refusal.fields["text"]
        kept = await collected(plane.stub.Generate(request("x" * 100, truncate_prompt_tokens=10)))
        assert kept[-1].usage.prompt_tokens == 10


async def test_a_request_id_is_used_once_at_a_time(plane: Serving) -> None:
    plane.backend.runner.gate.clear()
    first = plane.stub.Generate(request(request_id="r1", adapter="legal"))
    await eventually(lambda: plane.server.engine.stats().num_running == 1)
    refusal = await refused(plane.stub.Generate(request(request_id="r1", adapter="legal")))
    assert refusal.code is grpc.StatusCode.ALREADY_EXISTS
    assert "r1" in refusal.message
    plane.backend.runner.gate.set()
    assert len(tokens_of(await collected(first))) == 5
    await plane.idle()
    assert len(tokens_of(await collected(plane.stub.Generate(request(request_id="r1"))))) == 5


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with serving(max_waiting=1) as plane:
        plane.backend.runner.gate.clear()
        running = plane.stub.Generate(request())
        await eventually(lambda: plane.server.engine.stats().num_running == 1)
        waiting = plane.stub.Generate(request())
        await eventually(lambda: plane.server.engine.stats().num_waiting == 1)
        refusal = await refused(plane.stub.Generate(request()))
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "QUEUE_FULL"
        assert refusal.retry_after_s is not None
        assert not refusal.had_headers
        plane.backend.runner.gate.set()
        for call in (running, waiting):
            assert len(tokens_of(await collected(call))) == 5


async def test_abort_ends_a_stream_in_order(plane: Serving) -> None:
    plane.backend.runner.gate.clear()
    sampling = pb.SamplingParams(temperature=0, n=2)
    call = plane.stub.Generate(request(request_id="r1", max_tokens=200, adapter="legal", sampling=sampling))
    await eventually(lambda: plane.server.engine.stats().num_running == 2)
    answer = await plane.stub.Abort(pb.AbortRequest(request_id="r1"))
    assert answer.aborted
    plane.backend.runner.gate.set()
    responses = await collected(call)
    reasons = [response.finish.reason for response in responses if response.HasField("finish")]
    assert reasons == [pb.FINISH_REASON_ABORTED] * 2
    assert responses[-1].HasField("usage")
    await plane.idle()
    answer = await plane.stub.Abort(pb.AbortRequest(request_id="r1"))
    assert not answer.aborted


async def test_cancelling_before_the_first_token_frees_all(plane: Serving) -> None:
    plane.backend.runner.gate.clear()
    call = plane.stub.Generate(request(max_tokens=200, adapter="legal"))
    await eventually(lambda: plane.server.engine.stats().num_running == 1)
    call.cancel()
    plane.backend.runner.gate.set()
    await plane.idle()


async def test_cancelling_in_the_middle_frees_all(plane: Serving) -> None:
    call = plane.stub.Generate(request(max_tokens=250, adapter="legal"))
    await call.read()
    call.cancel()
    await plane.idle()


async def test_a_client_that_goes_away_while_it_reads_nothing_frees_all(plane: Serving) -> None:
    output = pb.OutputOptions(logprobs=20)
    calls = [plane.stub.Generate(request(max_tokens=250, adapter="legal", output=output)) for _ in range(4)]
    await eventually(lambda: plane.backend.runner.num_steps > 0)
    await asyncio.sleep(0.05)
    for call in calls:
        call.cancel()
    await plane.idle()


async def test_a_deadline_frees_all(plane: Serving) -> None:
    plane.backend.runner.gate.clear()
    call = plane.stub.Generate(request(max_tokens=200, adapter="legal"), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collected(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    plane.backend.runner.gate.set()
    await plane.idle()


async def test_an_adapter_that_cannot_be_loaded_fails_before_headers(tmp_path: Path) -> None:
    async with serving() as plane:
        folder = write_adapter(tmp_path / "legal")
        await asyncio.to_thread(plane.server.manager.register_trusted, "legal", str(folder))
        (folder / "adapter_config.json").unlink()
        refusal = await refused(plane.stub.Generate(request(adapter="legal")))
        assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
        assert not refusal.had_headers
        assert tokens_of(await collected(plane.stub.Generate(request()))) == expected_tokens(0, HELLO, 5)
        await plane.idle()


async def test_a_failed_first_step_is_an_error_before_headers(plane: Serving) -> None:
    plane.backend.runner.failures.append(RuntimeError("broken"))
    refusal = await refused(plane.stub.Generate(request(adapter="legal")))
    assert refusal.code is grpc.StatusCode.INTERNAL
    assert "broken" not in refusal.message
    assert not refusal.had_headers
    await plane.idle()


async def test_a_later_failure_ends_the_output_and_then_the_stream(plane: Serving) -> None:
    runner = plane.backend.runner
    runner.gate.clear()
    call = plane.stub.Generate(request(max_tokens=200))
    await eventually(lambda: runner.num_steps == 1)
    runner.failures.append(RuntimeError("broken"))
    runner.gate.set()
    refusal = await refused(call)
    assert refusal.code is grpc.StatusCode.INTERNAL
    assert refusal.had_headers
    assert tokens_of(refusal.responses) == expected_tokens(0, HELLO, 1)
    assert refusal.responses[-1].finish.reason == pb.FINISH_REASON_ERROR
    await plane.idle()


async def test_get_model_tells_the_limits(plane: Serving) -> None:
    model = await plane.stub.GetModel(pb.GetModelRequest())
    assert (model.name, model.architecture, model.device) == ("base", "FakeForCausalLM", "cpu")
    assert (model.vocab_size, model.max_model_len, model.hidden_size, model.num_layers) == (257, 256, 8, 2)
    assert (model.max_loras, model.max_lora_rank) == (2, 16)
    assert (model.kv_page_size, model.kv_pages) == (16, 64)
    assert model.has_chat_template
    assert model.max_outputs >= 1
    assert model.max_stop_strings >= 1
    assert model.server_version


async def test_tokenize_and_detokenize(plane: Serving) -> None:
    plain = await plane.stub.Tokenize(pb.TokenizeRequest(text="hello"))
    assert list(plain.token_ids) == HELLO
    bare = await plane.stub.Tokenize(pb.TokenizeRequest(text="hello", add_special_tokens=False))
    assert list(bare.token_ids) == HELLO[1:]
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    rendered = await plane.stub.Tokenize(pb.TokenizeRequest(messages=chat))
    assert rendered.text == "<user>hi<assistant>"
    text = await plane.stub.Detokenize(pb.DetokenizeRequest(token_ids=HELLO))
    assert text.text == "hello"
    text = await plane.stub.Detokenize(pb.DetokenizeRequest(token_ids=HELLO, skip_special_tokens=False))
    assert text.text == "<s>hello"


@pytest.mark.parametrize(
    ("method", "bad", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(text=""), "text"),
        ("Tokenize", pb.TokenizeRequest(messages=pb.ChatMessages()), "messages.messages"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 257]), "token_ids[1]"),
    ],
)
async def test_what_cannot_be_tokenised_is_refused(plane: Serving, method: str, bad: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(plane.stub, method)(bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")


async def test_each_request_is_one_line_of_the_log_without_its_text(plane: Serving) -> None:
    secret = "the heir to the throne"
    with capture_logs() as logs:
        trace = (("traceparent", f"00-{'4bf92f35' * 4}-00f067aa0ba902b7-01"),)
        await collected(
            plane.stub.Generate(request(secret, request_id="good", adapter="legal"), metadata=trace)
        )
        await refused(plane.stub.Generate(request(secret, request_id="bad", adapter="nobody")))
        await refused(plane.stub.Generate(request(secret, request_id="bad fields")))
        plane.backend.runner.failures.append(RuntimeError("broken"))
        await refused(plane.stub.Generate(request(secret, request_id="broken")))
        await plane.idle()
        await eventually(lambda: sum(line["event"] == "request" for line in logs) == 4)
    lines = {line["request_id"]: line for line in logs if line["event"] == "request"}
    good = lines["good"]
    assert (good["grpc_code"], good["finish_reason"], good["adapter"], good["adapter_version"]) == (
        "OK",
        "length",
        "legal",
        1,
    )
    assert good["trace_id"] == "4bf92f35" * 4
    assert (good["prompt_tokens"], good["completion_tokens"]) == (len(secret) + 1, 5)
    assert {"queue_ms", "ttft_ms", "decode_ms", "total_ms", "peer"} <= good.keys()
    assert lines["bad"]["grpc_code"] == "NOT_FOUND"
    assert (lines["bad fields"]["grpc_code"], lines["bad fields"]["fields"]) == (
        "INVALID_ARGUMENT",
        ["request_id"],
    )
    assert (lines["broken"]["grpc_code"], lines["broken"]["log_level"]) == ("INTERNAL", "error")
    assert secret not in repr(logs)


async def test_no_line_is_longer_for_a_long_request(plane: Serving) -> None:
    bad = request("hi", request_id="r" * 100_000, adapter="a" * 100_000)
    bad.messages.messages.extend([pb.ChatMessage()] * 500)
    with capture_logs() as logs:
        await refused(plane.stub.Generate(bad))
    [line] = [line for line in logs if line["event"] == "request"]
    assert line["grpc_code"] == "INVALID_ARGUMENT"
    assert len(repr(line)) < 2000


async def test_a_cancelled_request_has_its_line_too(plane: Serving) -> None:
    with capture_logs() as logs:
        plane.backend.runner.gate.clear()
        call = plane.stub.Generate(request(request_id="gone", max_tokens=200))
        await eventually(lambda: plane.server.engine.stats().num_running == 1)
        call.cancel()
        plane.backend.runner.gate.set()
        await eventually(lambda: any(line["event"] == "request" for line in logs))
    [line] = [line for line in logs if line["event"] == "request"]
    assert (line["request_id"], line["grpc_code"]) == ("gone", "CANCELLED")
