"""Streams collected through the generated stubs, as any client in any language would."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from deltaplane.v1 import generation_pb2, generation_pb2_grpc


@dataclass(frozen=True)
class Ask:
    """One greedy request.

    top: how many of the likeliest tokens to report for each token; or None.
    weights: of several adapters that are added up, in the place of `adapter`.
    """

    adapter: str
    prompt: Sequence[int] | str
    num_tokens: int
    top: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    def request(self) -> generation_pb2.GenerateRequest:
        request = generation_pb2.GenerateRequest(
            adapter=self.adapter,
            adapters=[
                generation_pb2.WeightedAdapter(adapter=name, weight=weight)
                for name, weight in self.weights.items()
            ],
            sampling=generation_pb2.SamplingParams(temperature=0),
            stop=generation_pb2.StopCondition(max_tokens=self.num_tokens, ignore_eos=True),
        )
        if isinstance(self.prompt, str):
            request.text = self.prompt
        else:
            request.token_ids.ids.extend(self.prompt)
        if self.top is not None:
            request.output.logprobs = self.top
        return request


@dataclass
class Answer:
    """All that a stream of one output brought."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish: Any = None
    usage: Any = None


async def ask_all(address: str, asks: Sequence[Ask]) -> list[Answer]:
    """Sends all requests at once and collects their answers."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return await asyncio.gather(*(collect(stub, ask.request()) for ask in asks))


async def collect(stub: Any, request: generation_pb2.GenerateRequest) -> Answer:
    answer = Answer()
    async for message in stub.Generate(request):
        assert answer.usage is None, "a message came after the last one"
        answer.text += message.text
        answer.tokens.extend(message.token_ids)
        for place in message.logprobs:
            answer.logprobs.append(
                {top.token_id: top.logprob for top in place.top} | {place.token_id: place.logprob}
            )
        if message.HasField("finish"):
            answer.finish = message.finish
        if message.HasField("usage"):
            answer.usage = message.usage
    assert answer.finish is not None
    assert answer.usage is not None
    return answer
