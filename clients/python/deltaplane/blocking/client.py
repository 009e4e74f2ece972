"""The blocking client of the data plane."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from deltaplane import requests
from deltaplane.blocking.adapters import AdapterClient
from deltaplane.blocking.calls import Plane, Stream
from deltaplane.channel import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, ChannelConfig
from deltaplane.completion import Completion
from deltaplane.requests import GenerateOptions, Prompt
from deltaplane.retry import RetryPolicy
from deltaplane.v1 import generation_pb2, generation_pb2_grpc


class Client:
    """Calls a server and blocks. Threads may share it.

        with Client() as client:
            for delta in client.generate("Once upon a time", adapter="creative-story", max_tokens=64):
                print(delta.text, end="", flush=True)

    address, admin_address: host:port of the data plane and of the control plane, which `adapters` calls.
    retry: tries calls again where that is safe (see deltaplane.retry); without it each is tried once.
    channel: TLS, token, keepalive, metadata.
    admin_channel: the same for the control plane, where it differs.

    Every call takes a `timeout` in seconds, over all its tries, and raises deltaplane.errors.DeltaplaneError.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        admin_address: str = DEFAULT_ADMIN_ADDRESS,
        *,
        retry: RetryPolicy | None = None,
        channel: ChannelConfig | None = None,
        admin_channel: ChannelConfig | None = None,
    ) -> None:
        self.adapters = AdapterClient(admin_address, retry=retry, channel=admin_channel or channel)
        self._plane = Plane(address, channel or ChannelConfig(), retry)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._plane.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls and closes both channels."""
        self._plane.channel.close()
        self.adapters.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream[generation_pb2.GenerateResponse]:
        """Starts a generation at once and gives its stream of deltas. For `options` see GenerateOptions."""
        return self._plane.stream(self._stub.Generate, requests.generate(prompt, options), timeout=timeout)

    def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generates to the end: texts, tokens and finish reasons of all outputs, and the usage."""
        completion = Completion()
        for delta in self.generate(prompt, timeout=timeout, **options):
            completion.add(delta)
        return completion

    def generate_text(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> str:
        """Generates to the end: the text of the first output."""
        return self.complete(prompt, timeout=timeout, **options).text

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Ends a request in flight. Answers whether there was one."""
        request = generation_pb2.AbortRequest(request_id=request_id)
        return self._plane.unary(self._stub.Abort, request, timeout=timeout, idempotent=True).aborted

    def model(self, *, timeout: float | None = None) -> generation_pb2.Model:
        """The base model and its limits."""
        request = generation_pb2.GetModelRequest()
        return self._plane.unary(self._stub.GetModel, request, timeout=timeout, idempotent=True)

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> generation_pb2.TokenizeResponse:
        """Token ids of text or chat messages, just as generate() makes them, and the text they stand for."""
        request = requests.tokenize(prompt, add_special_tokens)
        return self._plane.unary(self._stub.Tokenize, request, timeout=timeout, idempotent=True)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = requests.detokenize(token_ids, skip_special_tokens)
        return self._plane.unary(self._stub.Detokenize, request, timeout=timeout, idempotent=True).text

    def is_serving(self, *, timeout: float | None = None) -> bool:
        """Whether the data plane takes requests."""
        return self._plane.is_serving(timeout)
