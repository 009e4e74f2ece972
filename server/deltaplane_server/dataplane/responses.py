"""The engine's deltas as messages of the wire."""

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_server.engine.api import (
    AdapterUse,
    Finish,
    FinishReason,
    OutputDelta,
    TokenLogprobs,
    Usage,
    adapter_name,
)

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def to_response(delta: OutputDelta, *, omit_token_ids: bool) -> pb.GenerateResponse:
    """One message of the stream."""
    response = pb.GenerateResponse(
        request_id=delta.request_id,
        output_index=delta.index,
        text=delta.text,
        token_ids=() if omit_token_ids else delta.token_ids,
    )
    if delta.logprobs:
        response.logprobs.extend(map(_logprobs, delta.logprobs))
    if delta.finish is not None:
        response.finish.CopyFrom(_finish(delta.finish))
    if delta.usage is not None:
        response.usage.CopyFrom(_usage(delta.usage))
    return response


def _logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in logprobs.top],
    )


def _finish(finish: Finish) -> pb.Finish:
    message = pb.Finish(reason=_REASONS[finish.reason])
    if finish.matched_text is not None:
        message.stop = finish.matched_text
    elif finish.matched_token is not None:
        message.stop_token_id = finish.matched_token
    return message


def _usage(usage: Usage) -> pb.Usage:
    adapters = usage.adapters
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        queue_ms=usage.queue_ms,
        prefill_ms=usage.prefill_ms,
        decode_ms=usage.decode_ms,
        adapter=adapter_name(adapters),
        adapter_version=adapters[0].version if len(adapters) == 1 else 0,
        adapter_hit=all(use.hit for use in adapters),
        adapter_load_ms=usage.adapter_load_ms,
        preemptions=usage.preemptions,
        adapters=map(_adapter_usage, adapters),
    )


def _adapter_usage(use: AdapterUse) -> pb.AdapterUsage:
    return pb.AdapterUsage(adapter=use.adapter, version=use.version, weight=use.weight, hit=use.hit)
