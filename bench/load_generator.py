"""A gRPC load generator: client processes that send a load together, and what they saw of it."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from bench.load import Arrivals, Burst, Job, Observations, RequestMix
from bench.load_client import READY, run_client
from bench.report import percentile

BUSY = 0.9
"""A client that computes for a larger share of the time than this may be what is measured: its event loop and
gRPC's threads beside it share an interpreter, and so do little more than one processor's work."""

_HEAD_START_S = 0.05
_MAX_PROCESSES = 8


@dataclass(frozen=True)
class Percentiles:
    """In milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """By nearest rank; NaN where there is nothing."""
        p50, p90, p99 = (1e3 * percentile(seconds, share) for share in (0.50, 0.90, 0.99))
        return cls(p50, p90, p99)

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p90:.1f} / {self.p99:.1f}"


@dataclass(frozen=True)
class LoadResult:
    """What the clients saw in the measured window.

    seconds: its length; of a burst, until the last message.
    ttft: from when a request was due to its first token. itl: between messages of a stream.
    late: from when a request was due until the client sent it.
    errors: streams that did not end as they should, by status code.
    clients: processes. client_cpus: processor seconds a second that they took together.
    busiest_client: the most that one of them took.
    """

    seconds: float
    requests: int
    tokens_per_s: float
    requests_per_s: float
    messages_per_s: float
    ttft: Percentiles
    itl: Percentiles
    late: Percentiles
    errors: dict[str, int]
    clients: int
    client_cpus: float
    busiest_client: float

    @property
    def is_client_bound(self) -> bool:
        return self.busiest_client > BUSY

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class LoadGenerator:
    """Client processes of one server, which are kept from load to load. A context manager.

    address: of the data plane. processes: by default half of the cores, and at most 8.
    """

    def __init__(self, address: str, processes: int | None = None) -> None:
        self._address = address
        self._number = processes or max(1, min(_MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2))
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for number in range(self._number):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_client, args=(theirs, self._address), name=f"load client {number}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def run(self, mix: RequestMix, arrivals: Arrivals, *, seed: int = 0) -> LoadResult:
        """Sends a load and waits for its end. Errors: SystemExit where a client process has died."""
        try:
            for number, pipe in enumerate(self._pipes):
                pipe.send(Job(mix, arrivals, number, self._number, seed))
            if any(pipe.recv() != READY for pipe in self._pipes):
                raise EOFError
            start = time.monotonic() + _HEAD_START_S
            for pipe in self._pipes:
                pipe.send(start)
            return _result([pipe.recv() for pipe in self._pipes], arrivals, start)
        except (EOFError, ConnectionError) as error:
            raise SystemExit("bench: a client process has died; its traceback stands above") from error


def _result(seen: Sequence[Observations], arrivals: Arrivals, start: float) -> LoadResult:
    last = max(part.last for part in seen)
    seconds = max(last - start, 1e-9) if isinstance(arrivals, Burst) else arrivals.seconds
    requests = sum(part.requests for part in seen)
    return LoadResult(
        seconds=seconds,
        requests=requests,
        tokens_per_s=sum(part.tokens for part in seen) / seconds,
        requests_per_s=requests / seconds,
        messages_per_s=sum(part.messages for part in seen) / seconds,
        ttft=Percentiles.of([value for part in seen for value in part.ttft]),
        itl=Percentiles.of([value for part in seen for value in part.itl]),
        late=Percentiles.of([value for part in seen for value in part.late]),
        errors=dict(sum((part.errors for part in seen), Counter[str]())),
        clients=len(seen),
        client_cpus=sum(part.cpu_s / part.wall_s for part in seen),
        busiest_client=max(part.cpu_s / part.wall_s for part in seen),
    )
