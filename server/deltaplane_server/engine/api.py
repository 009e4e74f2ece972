"""What goes into the engine and what comes out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from deltaplane_server.scheduling.lease import AdapterLease
from deltaplane_server.scheduling.plan import SampledToken, StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """An adapter's part in an answer: its version, the factor of its delta, and whether it was resident at
    admission."""

    adapter: str
    version: int
    weight: float = 1.0
    hit: bool = True


def adapter_name(adapters: Sequence[AdapterUse]) -> str:
    """Who answers, in one word: the adapter's name, those of several joined by "+" (which is in no name), or
    nothing for the base model."""
    return "+".join(use.adapter for use in adapters)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request. The engine owns `lease` from the moment submit() returns and releases it at the end.

    num_outputs: output i draws with seed + i where a seed is set.
    adapters: that answer, for usage and logs, in order of their names; none for the base model.
    stream_interval: tokens of an output that are sent together, at least 1.
    """

    request_id: str
    prompt_tokens: Sequence[int]
    sampling: SamplingParams
    stop: StopParams
    num_outputs: int = 1
    lease: AdapterLease | None = None
    adapters: tuple[AdapterUse, ...] = ()
    tenant: str = ""
    priority: int = 0
    skip_special_tokens: bool = True
    stream_interval: int = 1

    @property
    def adapter(self) -> str:
        """Who answers (see adapter_name)."""
        return adapter_name(self.adapters)


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended. At most one of matched_text and matched_token is set, on STOP only.

    error: what failed, on ERROR only.
    """

    reason: FinishReason
    matched_text: str | None = None
    matched_token: int | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Figures of a whole request; times in milliseconds (see Usage in generation.proto)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    adapters: tuple[AdapterUse, ...]
    adapter_load_ms: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A drawn token's natural log-probability and the likeliest (token, log-probability) pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class OutputDelta:
    """What is new of one output: text and tokens since the last delta, never cumulative. Nobody changes one;
    it is not frozen because one is made for every token, and that would take three times as long.

    finish: set on the last delta of this output, and only there.
    usage: set on the last delta of the request, and only there.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> list[SampledToken]:
        """Waits for the step and answers a token for each scheduled sequence that samples, in plan order."""
        ...


class Runner(Protocol):
    """Computes steps. The only face of tensors towards the engine; called by the engine thread alone."""

    @property
    def max_steps_under_way(self) -> int:
        """1, or 2 where a step may be submitted before the one before it has been read: its decodes then go
        on from tokens that the runner alone knows (Sequence.num_pending)."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts a step. Steps are computed in the order in which they are submitted."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a finished sequence (its token counts)."""
        ...


class TokenDecoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    @property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Tokens such as "<0x0A>", which stand for a byte that the vocabulary has no text for, and of which
        neighbours are decoded together (SentencePiece); empty for byte-level BPE."""
        ...

    @property
    def pieces(self) -> Mapping[int, str]:
        """Tokens that add the same text wherever they stand, and that text; at the start of a text they may
        add less. Special tokens, parts of characters and byte-fallback tokens are never among them, nor need
        any other be."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids. More ids only add to it, apart from U+FFFD at its end and from byte-fallback
        tokens there: spaces are not cleaned up."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics and GetCapacity.

    num_waiting, num_running: outputs of requests, in no step and in steps.
    kv_pages_free: pages that no sequence holds; they may hold the prefix cache.
    prefix_cache_queries, prefix_cache_hits: tokens looked up since the start, and those of them found.
    """

    num_waiting: int
    num_running: int
    kv_pages_total: int
    kv_pages_free: int
    prefix_cache_queries: int
    prefix_cache_hits: int


class EngineObserver(Protocol):
    """Told of what happens, from the engine thread; must be quick and must not raise.

    on_first_token: once a request, counted from its acceptance. on_inter_token: once a further token of an
    output. on_finish: once a request, with the reason of the output that ended last.
    """

    def on_step(self, *, seconds: float, num_tokens: int, num_decodes: int, num_adapters: int) -> None: ...
    def on_first_token(self, *, adapter: str, seconds: float) -> None: ...
    def on_inter_token(self, *, seconds: float) -> None: ...
    def on_preemption(self) -> None: ...
    def on_finish(self, *, request: GenerationRequest, usage: Usage, reason: FinishReason) -> None: ...


class SilentObserver:
    """An EngineObserver that does nothing."""

    def on_step(self, *, seconds: float, num_tokens: int, num_decodes: int, num_adapters: int) -> None:
        pass

    def on_first_token(self, *, adapter: str, seconds: float) -> None:
        pass

    def on_inter_token(self, *, seconds: float) -> None:
        pass

    def on_preemption(self) -> None:
        pass

    def on_finish(self, *, request: GenerationRequest, usage: Usage, reason: FinishReason) -> None:
        pass
