"""The data plane's gRPC service."""

from collections.abc import Mapping
from typing import Any

import grpc

from deltaplane.v1 import generation_pb2 as pb
from deltaplane.v1.generation_pb2_grpc import GenerationServiceServicer
from deltaplane_server.dataplane.admission import Admission
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.dataplane.metadata import ADAPTER_VERSION, REQUEST_ID, fill_from_metadata, trace_id
from deltaplane_server.dataplane.prompts import Prompts
from deltaplane_server.dataplane.responses import to_response
from deltaplane_server.dataplane.validation import check_prompt, check_token_ids
from deltaplane_server.dataplane.violations import Violations
from deltaplane_server.engine.async_engine import AsyncEngine, OutputStream
from deltaplane_server.telemetry.request_log import RequestLog, RequestRecord

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(GenerationServiceServicer):
    """See generation.proto. Raises errors of deltaplane's tree; the error interceptor answers them."""

    def __init__(
        self,
        model: pb.Model,
        limits: RequestLimits,
        prompts: Prompts,
        admission: Admission,
        engine: AsyncEngine,
        request_log: RequestLog,
    ) -> None:
        self._model = model
        self._limits = limits
        self._prompts = prompts
        self._admission = admission
        self._engine = engine
        self._request_log = request_log

    async def Generate(  # type: ignore[override]  # the stubs know of generators only
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Writes the messages itself: a generator would be resumed through each interceptor for each."""
        metadata = _text_metadata(context)
        fill_from_metadata(request, metadata, self._model.name)
        with self._request_log.record(context, request, trace_id(metadata)) as record:
            accepted = await self._admission.admit(request)
            record.accept(accepted.request)
            async with accepted.stream as stream:
                await _answer(stream, request, context, record)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=self._engine.abort(request.request_id))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        return self._model

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        found = Violations()
        check_prompt(request, self._limits, found)
        found.raise_if_any()
        if request.WhichOneof("prompt") == "messages":
            tokenized = await self._prompts.tokenize_messages(request.messages)
        else:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            tokenized = await self._prompts.tokenize_text(request.text, add_special_tokens=special)
        return pb.TokenizeResponse(token_ids=tokenized.token_ids, text=tokenized.text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        found = Violations()
        check_token_ids("token_ids", request.token_ids, self._limits, found)
        found.raise_if_any()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._prompts.detokenize(list(request.token_ids), skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)


async def _answer(
    stream: OutputStream, request: pb.GenerateRequest, context: Context, record: RequestRecord
) -> None:
    """Sends a stream. Headers go out with the first message, so that what failed before it has none.

    Errors: what made an output fail: before any message, or at the end after the other outputs.
    """
    omit_token_ids = request.output.omit_token_ids
    failure: Exception | None = None
    started = False
    async for delta in stream:
        if delta.finish is not None and delta.finish.error is not None:
            failure = delta.finish.error
        if not started:
            if failure is not None:
                break
            started = True
            await context.send_initial_metadata(_headers(record))
        record.add(delta)
        await context.write(to_response(delta, omit_token_ids=omit_token_ids))
    if failure is not None:
        raise failure


def _headers(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    headers = ((REQUEST_ID, record.request_id),)
    versions = ",".join(str(use.version) for use in record.adapters)
    return (*headers, (ADAPTER_VERSION, versions)) if versions else headers


def _text_metadata(context: Context) -> Mapping[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
