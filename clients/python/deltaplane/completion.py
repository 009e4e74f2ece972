"""What a whole stream adds up to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deltaplane.v1.generation_pb2 import Finish, FinishReason, GenerateResponse, TokenLogprobs, Usage


@dataclass(slots=True)
class Output:
    """One output. finish: why it ended; None where the stream broke off before."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def finish_reason(self) -> str:
        """The reason as one word: "stop", "length", "aborted" or "error"; empty where there is none."""
        if self.finish is None:
            return ""
        return FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_").lower()


class Completion:
    """Adds deltas up: whatever has arrived so far is there to be read."""

    def __init__(self) -> None:
        self.request_id = ""
        self.usage: Usage | None = None
        self._outputs: dict[int, Output] = {}

    def add(self, delta: GenerateResponse) -> None:
        """Takes the next message of the stream."""
        output = self._outputs.setdefault(delta.output_index, Output())
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        output.logprobs.extend(delta.logprobs)
        if delta.HasField("finish"):
            output.finish = delta.finish
        if delta.HasField("usage"):
            self.usage = delta.usage
        self.request_id = delta.request_id

    @property
    def outputs(self) -> Mapping[int, Output]:
        """The outputs by their index, from 0."""
        return MappingProxyType(self._outputs)

    @property
    def text(self) -> str:
        """The text of output 0."""
        return self._outputs[0].text if 0 in self._outputs else ""
