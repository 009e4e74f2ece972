"""Logs: one form for ours and others', and never a prompt."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import structlog

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.config import LogFormat
from deltaplane_server.engine.api import (
    AdapterUse,
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    Usage,
)
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.telemetry.logs import setup_logging
from deltaplane_server.telemetry.request_log import RequestLog

SECRET = "the heir to the throne"
USAGE = Usage(
    prompt_tokens=5, completion_tokens=2, cached_tokens=0, queue_ms=1.25, prefill_ms=2.0, decode_ms=3.5,
    adapters=(AdapterUse("legal", 3),), adapter_load_ms=0.0, preemptions=0,
)  # fmt: skip


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, config = root.handlers[:], root.level, structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.configure(**config)


@pytest.fixture
def stream(restored_logging: None) -> io.StringIO:
    return io.StringIO()


class FakeContext:
    """As much of a grpc.aio.ServicerContext as a record reads."""

    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.OK, remaining: float | None = None) -> None:
        self._code = code
        self._remaining = remaining

    def code(self) -> int:
        return int(self._code.value[0])

    def time_remaining(self) -> float | None:
        return self._remaining

    def peer(self) -> str:
        return "ipv4:10.0.0.1:4242"


def accepted(**fields: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r1", sampling=SamplingParams(), stop=StopParams(max_tokens=2), **fields
    )


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail_with_a_prompt(prompt: str) -> None:
    raise ValueError("something broke")


def run_a_request_that_raises(error: BaseException, context: FakeContext) -> None:
    request = pb.GenerateRequest(request_id="r1", text=SECRET)
    with RequestLog(log_prompts=False).record(context, request):  # type: ignore[arg-type]
        raise error


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_a_traceback_shows_no_variables(stream: io.StringIO, log_format: LogFormat) -> None:
    setup_logging(log_format, "info", stream)
    for log in (structlog.get_logger("ours"), logging.getLogger("theirs")):
        try:
            fail_with_a_prompt(SECRET[:8] + SECRET[8:])
        except ValueError:
            log.exception("failed")
    assert stream.getvalue().count("fail_with_a_prompt") >= 2
    assert "something broke" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_json_lines_of_structlog_and_of_the_standard_library_have_one_form(stream: io.StringIO) -> None:
    setup_logging(LogFormat.JSON, "info", stream)
    structlog.get_logger("ours").info("loaded", adapter="a")
    logging.getLogger("theirs").warning("old %s", "api")
    ours, theirs = lines(stream)
    assert ours["message"] == "loaded"
    assert ours["adapter"] == "a"
    assert (theirs["message"], theirs["level"], theirs["logger"]) == ("old api", "warning", "theirs")
    assert ours.keys() - {"adapter"} == theirs.keys()


def test_the_level_holds_for_all_and_chatty_libraries_only_warn(stream: io.StringIO) -> None:
    setup_logging(LogFormat.JSON, "info", stream)
    structlog.get_logger("ours").debug("no")
    logging.getLogger("theirs").debug("no")
    for library in ("httpx", "httpx2", "httpcore2", "botocore"):
        logging.getLogger(library).info("no")
    logging.getLogger("httpx").warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def test_console_lines_are_for_people(stream: io.StringIO) -> None:
    setup_logging(LogFormat.CONSOLE, "info", stream)
    structlog.get_logger("ours").info("loaded", adapter="a")
    [line] = stream.getvalue().splitlines()
    assert "loaded" in line
    assert "adapter=a" in line
    assert "\x1b" not in line


def test_a_request_is_one_line(stream: io.StringIO) -> None:
    setup_logging(LogFormat.JSON, "info", stream)
    request = pb.GenerateRequest(request_id="r1", adapter="legal", text=SECRET)
    with RequestLog(log_prompts=False).record(FakeContext(), request, "trace") as record:  # type: ignore[arg-type]
        record.accept(accepted(adapters=(AdapterUse("legal", 3),), prompt_tokens=(1, 2, 3, 4, 5)))
        record.add(OutputDelta("r1", 0, SECRET, (7,)))
        record.add(OutputDelta("r1", 0, "", (8,), finish=Finish(FinishReason.LENGTH), usage=USAGE))
    [line] = lines(stream)
    assert line["message"] == "request"
    expected = {
        "request_id": "r1", "adapter": "legal", "adapter_version": 3, "prompt_tokens": 5,
        "completion_tokens": 2, "queue_ms": 1.2, "decode_ms": 3.5, "finish_reason": "length",
        "grpc_code": "OK", "peer": "ipv4:10.0.0.1:4242",
    }  # fmt: skip
    assert line.items() >= expected.items()
    assert line["ttft_ms"] >= 0
    assert SECRET not in stream.getvalue()


def test_all_adapters_of_a_composition_are_named(stream: io.StringIO) -> None:
    setup_logging(LogFormat.JSON, "info", stream)
    terms = [pb.WeightedAdapter(adapter=name) for name in ("story", "legal")]
    request = pb.GenerateRequest(request_id="r1", adapters=terms, text=SECRET)
    uses = (AdapterUse("legal", 3, weight=0.5), AdapterUse("story", 1, weight=-2.0))
    for accepts in (True, False):
        with RequestLog(log_prompts=False).record(FakeContext(), request) as record:  # type: ignore[arg-type]
            if accepts:
                record.accept(accepted(adapters=uses, prompt_tokens=(1, 2)))
    served, refused = lines(stream)
    assert served["adapter"] == refused["adapter"] == "legal+story"
    assert served["adapters"] == ["legal@3 * 0.5", "story@1 * -2"]
    assert "adapter_version" not in served


@pytest.mark.parametrize(
    ("prompt", "logged"),
    [
        ({"text": SECRET}, SECRET),
        ({"token_ids": pb.TokenIds(ids=[4, 2])}, [4, 2]),
        (
            {"messages": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=SECRET)])},
            [{"role": "user", "content": SECRET}],
        ),
    ],
)
def test_prompts_are_logged_where_asked(stream: io.StringIO, prompt: dict[str, Any], logged: object) -> None:
    setup_logging(LogFormat.JSON, "info", stream)
    request = pb.GenerateRequest(request_id="r1", **prompt)
    with RequestLog(log_prompts=True).record(FakeContext(), request):  # type: ignore[arg-type]
        pass
    [line] = lines(stream)
    assert line["prompt"] == logged


@pytest.mark.parametrize(
    ("error", "context", "code"),
    [
        (InvalidArgumentError.for_field("text", SECRET), FakeContext(), "INVALID_ARGUMENT"),
        (asyncio.CancelledError(), FakeContext(remaining=5.0), "CANCELLED"),
        (asyncio.CancelledError(), FakeContext(), "CANCELLED"),
        (asyncio.CancelledError(), FakeContext(remaining=0.0), "DEADLINE_EXCEEDED"),
        (GeneratorExit(), FakeContext(), "CANCELLED"),
        (RuntimeError(SECRET), FakeContext(), "INTERNAL"),
    ],
)
def test_a_request_that_fails_says_how(
    stream: io.StringIO, error: BaseException, context: FakeContext, code: str
) -> None:
    setup_logging(LogFormat.JSON, "info", stream)
    with pytest.raises(type(error)):
        run_a_request_that_raises(error, context)
    [line] = lines(stream)
    assert (line["request_id"], line["grpc_code"]) == ("r1", code)
    assert SECRET not in stream.getvalue()
    assert line.get("fields") == (["text"] if code == "INVALID_ARGUMENT" else None)
