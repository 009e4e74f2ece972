"""What the way through gRPC costs: a real server over a model that computes nothing (bench.paced_server).

    python -m bench.front_door                         # 64 streams at 5.5 ms a step, 256 at 9.5
    python -m bench.front_door --rows 256,4.75         # by streams and milliseconds a step

All streams decode, for clients in processes of their own. "kept" is the share of streams / step that came
through. Loop and engine are the threads that share the server's GIL, in microseconds of processor time a
token. More than one token a message means that the event loop was behind, and deltas were merged.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from json import loads
from pathlib import Path

from bench import report
from bench.load import Burst, ClosedLoop, Lengths, RequestMix
from bench.load_generator import LoadGenerator, LoadResult
from bench.paced_server import MAX_MODEL_LEN, VOCAB_SIZE

_WARMUP_S = 2.0
_PROMPT = 16
_START_S = 120.0


@dataclass(frozen=True)
class Row:
    """Streams at once, and milliseconds that a step takes."""

    streams: int
    step_ms: float

    @classmethod
    def parse(cls, text: str) -> "Row":
        streams, step_ms = text.split(",")
        return cls(int(streams), float(step_ms))

    @property
    def tokens_per_s(self) -> float:
        """Of a device that never waits."""
        return self.streams / self.step_ms * 1000


@dataclass(frozen=True)
class Figures:
    """What the clients saw, and microseconds of processor time a token of both threads."""

    load: LoadResult
    kept: float
    loop_us: float
    engine_us: float


@dataclass(frozen=True)
class PacedServer:
    """A server that serves. thread_ids: of its event loop and of its engine."""

    pid: int
    address: str
    output: Iterator[str]

    def thread_ids(self) -> tuple[int, int]:
        """Once a step was made."""
        return self.pid, int(next(self.output))


def main(argv: Sequence[str] | None = None) -> dict[str, Figures]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Row.parse, default=[Row(64, 5.5), Row(256, 9.5)])
    parser.add_argument("--seconds", type=float, default=5.0, help="that are measured")
    parser.add_argument("--clients", type=int, help="processes; default: half of the cores, at most 8")
    args = parser.parse_args(argv)
    results = {f"{row.streams}, {row.step_ms:g}": _measure(row, args) for row in args.rows}
    _show(results)
    workload = {"seconds": args.seconds, "prompt_tokens": _PROMPT}
    path = report.write("front-door", workload, {key: asdict(row) for key, row in results.items()})
    print(f"written to {path}")
    return results


def _measure(row: Row, args: argparse.Namespace) -> Figures:
    steps = (_WARMUP_S + args.seconds) / row.step_ms * 1000
    if steps > MAX_MODEL_LEN / 2:
        raise SystemExit("bench.front_door: the streams would end too early; measure for fewer seconds")
    endless = RequestMix(
        VOCAB_SIZE, Lengths(_PROMPT, _PROMPT), Lengths(MAX_MODEL_LEN // 2, MAX_MODEL_LEN // 2)
    )
    short = RequestMix(VOCAB_SIZE, Lengths(_PROMPT, _PROMPT), Lengths(4, 4))
    with _paced_server(row) as server, LoadGenerator(server.address, args.clients) as generator:
        generator.run(short, Burst(row.streams))
        threads = server.thread_ids()
        before = [_processor_us(server.pid, thread) for thread in threads]
        load = generator.run(endless, ClosedLoop(row.streams, _WARMUP_S, args.seconds))
        after = [_processor_us(server.pid, thread) for thread in threads]
    tokens = load.tokens_per_s * (_WARMUP_S + args.seconds)
    loop_us, engine_us = ((end - begin) / tokens for begin, end in zip(before, after, strict=True))
    return Figures(load, load.tokens_per_s / row.tokens_per_s, loop_us, engine_us)


@contextmanager
def _paced_server(row: Row) -> Iterator[PacedServer]:
    with tempfile.TemporaryDirectory() as folder:
        ports_file = Path(folder) / "ports.json"
        command = [sys.executable, "-m", "bench.paced_server", "--ports-file", str(ports_file)]
        command += ["--step-ms", str(row.step_ms), "--max-num-seqs", str(row.streams)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            begin = time.monotonic()
            while not ports_file.exists():
                if process.poll() is not None or time.monotonic() - begin > _START_S:
                    raise SystemExit("bench.front_door: the server did not start")
                time.sleep(0.02)
            address = f"127.0.0.1:{loads(ports_file.read_text())['port']}"
            yield PacedServer(process.pid, address, process.stdout)
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()


def _processor_us(pid: int, thread: int) -> float:
    """Microseconds of processor time that a thread has taken (Linux)."""
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1000


def _show(results: dict[str, Figures]) -> None:
    report.print_table(
        "Through gRPC",
        [
            "streams, ms per step",
            "tokens / s",
            "kept",
            "tokens / message",
            "loop, us",
            "engine, us",
            "ITL p50 / p90 / p99",
        ],
        [
            [
                key,
                f"{row.load.tokens_per_s:.0f}",
                f"{row.kept:.3f}",
                f"{row.load.tokens_per_s / row.load.messages_per_s:.2f}",
                f"{row.loop_us:.1f}",
                f"{row.engine_us:.1f}",
                str(row.load.itl),
            ]
            for key, row in results.items()
        ],
    )
    for key, row in results.items():
        if row.load.is_client_bound:
            print(f"{key}: a client took {row.load.busiest_client:.2f} processors; start more of them")


if __name__ == "__main__":
    main()
