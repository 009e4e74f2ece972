"""What a load is made of: requests, and how they arrive; and what one client process saw of it.

No torch, no gRPC: all of it is sent between processes.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, count


class Choice(Enum):
    """Who of N adapters is asked.

    ROUND_ROBIN: one after the other. UNIFORM: each with the same probability. ZIPF: the k-th with a
    probability in proportion to 1 / k, the power law with exponent 1 of S-LoRA's workloads (Sheng et al.,
    2023).
    """

    ROUND_ROBIN = "round-robin"
    UNIFORM = "uniform"
    ZIPF = "zipf"


@dataclass(frozen=True)
class Lengths:
    """A number of tokens, uniform from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From "128" or "8-512". Errors: ValueError."""
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text!r} is not a number of tokens such as 128 or 8-512")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Request:
    """A prompt of random token ids, and the tokens of output that it gets; ends of sequence are ignored.

    adapter: empty for the base model. temperature: 0 is greedy.
    """

    adapter: str
    prompt: list[int]
    output: int
    temperature: float


@dataclass(frozen=True)
class RequestMix:
    """What requests ask for.

    vocab_size: prompts are of ids below it. adapters: names; none for the base model.
    """

    vocab_size: int
    prompt: Lengths
    output: Lengths
    adapters: tuple[str, ...] = ()
    choice: Choice = Choice.ROUND_ROBIN
    temperature: float = 0.0

    def requests(self, client: int, num_clients: int, seed: int) -> Iterator[Request]:
        """Endlessly those of one of several clients; the same ones for the same numbers."""
        rng = random.Random(f"{seed} {client}")
        adapters = self._adapters(client, num_clients, rng)
        ids = range(self.vocab_size)
        while True:
            prompt = rng.choices(ids, k=self.prompt.draw(rng))
            yield Request(next(adapters), prompt, self.output.draw(rng), self.temperature)

    def _adapters(self, client: int, num_clients: int, rng: random.Random) -> Iterator[str]:
        names = self.adapters or ("",)
        if self.choice is Choice.ROUND_ROBIN:
            yield from (names[i % len(names)] for i in count(client, num_clients))
        weights = [1 / k if self.choice is Choice.ZIPF else 1.0 for k in range(1, len(names) + 1)]
        cumulative = list(accumulate(weights))
        while True:
            yield from rng.choices(names, cum_weights=cumulative, k=64)


@dataclass(frozen=True)
class Burst:
    """So many requests at once, all of which are measured."""

    requests: int


@dataclass(frozen=True)
class ClosedLoop:
    """So many streams, each of which sends its next request when the last one has ended: a load that
    saturates a server of as many sequences. What happens in `seconds` after the warm-up is measured."""

    streams: int
    warmup_s: float
    seconds: float


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals of `rate` requests a second, however many are under way. What happens in `seconds`
    after the warm-up is measured."""

    rate: float
    warmup_s: float
    seconds: float


Arrivals = Burst | ClosedLoop | Poisson


@dataclass(frozen=True)
class Job:
    """The part of a load that one client process sends."""

    mix: RequestMix
    arrivals: Arrivals
    client: int
    num_clients: int
    seed: int

    @property
    def share(self) -> int:
        """This client's part of the burst's requests, or of the streams."""
        total = self.arrivals.requests if isinstance(self.arrivals, Burst) else 0
        total = self.arrivals.streams if isinstance(self.arrivals, ClosedLoop) else total
        return len(range(self.client, total, self.num_clients))


@dataclass
class Observations:
    """What one client process saw within the measured window. Times are in seconds.

    ttft: from when a request was due to its first token. itl: between messages of a stream.
    late: from when a request was due until it was sent, which is the client's own fault.
    last: when the last message came, on the monotonic clock, which all processes share.
    errors: streams that ended otherwise than they should, by status code.
    cpu_s, wall_s: processor time of the process, of the time that the whole job took.
    """

    requests: int = 0
    tokens: int = 0
    messages: int = 0
    ttft: "array[float]" = field(default_factory=lambda: array("d"))
    itl: "array[float]" = field(default_factory=lambda: array("d"))
    late: "array[float]" = field(default_factory=lambda: array("d"))
    last: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wall_s: float = 0.0
