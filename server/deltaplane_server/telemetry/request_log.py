"""One line in the log for each request, at its end. It never holds prompt or output, unless asked to."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import structlog

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_controlplane.errors import DeltaplaneError, InvalidArgumentError
from deltaplane_controlplane.status import status_code
from deltaplane_server.engine.api import AdapterUse, Finish, GenerationRequest, OutputDelta, Usage
from deltaplane_server.telemetry.grpc_metrics import Context, answered_code, failed_code

_MAX_NAME_LENGTH = 128
"""No single name of a request that is served is longer; one that is refused for it is cut off."""

_MAX_FIELDS = 16
"""Named of those that are out of bounds."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request so far.

    adapter: who answers, in one word. adapters: the same once it is accepted, with versions and weights.
    finish: how its outputs ended, one each.
    first_token: seconds on the monotonic clock.
    """

    request_id: str
    adapter: str
    peer: str
    adapters: tuple[AdapterUse, ...] = ()
    trace_id: str | None = None
    prompt: object = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usage: Usage | None = None
    finish: list[Finish] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def accept(self, request: GenerationRequest) -> None:
        """Notes what a request is answered from."""
        self.adapter, self.adapters = request.adapter, request.adapters
        self.prompt_tokens = len(request.prompt_tokens)

    def add(self, delta: OutputDelta) -> None:
        """Takes in what is about to be sent."""
        if self.first_token is None and delta.token_ids:
            self.first_token = time.monotonic()
        self.completion_tokens += len(delta.token_ids)
        if delta.finish is not None:
            self.finish.append(delta.finish)
        if delta.usage is not None:
            self.usage = delta.usage

    def fields(self) -> dict[str, object]:
        """The line's fields; times in milliseconds. What is unknown is left out."""
        ttft_ms = None if self.first_token is None else (self.first_token - self.begin) * 1000
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "peer": self.peer,
            "adapter": self.adapter,
            **self._versions(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "queue_ms": _ms(self.usage.queue_ms if self.usage else None),
            "ttft_ms": _ms(ttft_ms),
            "decode_ms": _ms(self.usage.decode_ms if self.usage else None),
            "total_ms": _ms((time.monotonic() - self.begin) * 1000),
            "finish_reason": ",".join(finish.reason.value for finish in self.finish) or None,
            "trace_id": self.trace_id,
            "prompt": self.prompt,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _versions(self) -> dict[str, object]:
        """The version of the adapter; of several, their versions and weights."""
        if len(self.adapters) > 1 or any(use.weight != 1 for use in self.adapters):
            return {"adapters": [f"{use.adapter}@{use.version} * {use.weight:g}" for use in self.adapters]}
        return {"adapter_version": self.adapters[0].version if self.adapters else 0}


class RequestLog:
    """Writes the lines."""

    def __init__(self, *, log_prompts: bool) -> None:
        self._log_prompts = log_prompts

    @contextmanager
    def record(
        self, context: Context, request: pb.GenerateRequest, trace_id: str | None = None
    ) -> Iterator[RequestRecord]:
        """A record that is written when the block ends, however it ends."""
        prompt = _prompt(request) if self._log_prompts else None
        # The peer is asked for now: of a call that is over, grpcio reads freed memory.
        record = RequestRecord(
            request_id=request.request_id[:_MAX_NAME_LENGTH],
            adapter=_asked_for(request)[:_MAX_NAME_LENGTH],
            peer=context.peer(),
            trace_id=trace_id,
            prompt=prompt,
        )
        failure: BaseException | None = None
        try:
            yield record
        except BaseException as error:
            failure = error
            raise
        finally:
            _write(record, context, failure)


def _write(record: RequestRecord, context: Context, failure: BaseException | None) -> None:
    code = _code(context, failure)
    write = log.error if code is grpc.StatusCode.INTERNAL else log.info
    write("request", grpc_code=code.name, **_reason(failure), **record.fields())


def _code(context: Context, failure: BaseException | None) -> grpc.StatusCode:
    """The code that the error interceptor makes of it."""
    if failure is None:
        return answered_code(context)
    if isinstance(failure, DeltaplaneError):
        return status_code(failure)
    code = failed_code(failure, context)
    return grpc.StatusCode.INTERNAL if code is grpc.StatusCode.UNKNOWN else code


def _reason(failure: BaseException | None) -> dict[str, object]:
    """Why a request was refused: names of fields, for their values may be a prompt's."""
    if not isinstance(failure, DeltaplaneError):
        return {}
    reason: dict[str, object] = {"reason": failure.reason}
    if isinstance(failure, InvalidArgumentError) and failure.violations:
        reason["fields"] = [violation.field for violation in failure.violations[:_MAX_FIELDS]]
    return reason


def _asked_for(request: pb.GenerateRequest) -> str:
    """Who is to answer, as long as nobody has checked it."""
    return request.adapter or "+".join(sorted(term.adapter for term in request.adapters[:_MAX_NAME_LENGTH]))


def _prompt(request: pb.GenerateRequest) -> object:
    """The prompt as it came."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case "messages":
            return [{"role": turn.role, "content": turn.content} for turn in request.messages.messages]
        case _:
            return None


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
