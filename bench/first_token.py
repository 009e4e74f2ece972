"""How long a request to an idle server waits for its first token, and how long the server takes to start.

    python -m bench.first_token                # adapters of rank 16 on Llama-3-8B shapes on the GPU
    python -m bench.first_token --quick        # fewer requests
    python -m bench.first_token --tiny         # a tiny model on any device, to see that it runs

One request at a time, through gRPC, with a prompt of 128 random tokens. Its adapter is, in turn: none (base);
on the device (resident); in the server's host cache (host); or nowhere but in the page cache of the disk
(cold). The control plane makes each case. Start is from the command to ready, with LoRA on, and the model's
files in the page cache.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench import report
from bench.load_generator import Percentiles
from bench.random_server import add_arguments, bring_adapters, serve, write_checkpoint
from deltaplane import Client
from deltaplane.v1.adapters_pb2 import LoadTimings

RANK = 16
ADAPTERS = 8
"""They take turns, so that the files of none are in the processor's cache."""
STAGES = ("queue_ms", "read_ms", "pack_ms", "copy_ms")
OUTPUT = 4


@dataclass(frozen=True)
class Case:
    """Milliseconds. load: the medians of the stages of the adapter's load, where there was one."""

    ttft: Percentiles
    load: dict[str, float] | None = None


@dataclass(frozen=True)
class FirstTokens:
    """start_s: seconds from the command to ready."""

    start_s: float
    cases: dict[str, Case]


def main(argv: Sequence[str] | None = None) -> FirstTokens:
    args = _parse(argv)
    checkpoint = write_checkpoint(args, adapters=ADAPTERS, rank=RANK)
    flags = ["--max-loras", str(ADAPTERS), "--max-lora-rank", str(RANK)]
    with serve(args, checkpoint, *flags) as server:
        bring_adapters(server, checkpoint.adapters)
        with Client(server.address, server.admin_address) as client:
            cases = _Requests(client, list(checkpoint.adapters), args.prompt).measure(args.repeats)
        results = FirstTokens(server.ready_s, cases)
    _show(results)
    workload = {
        "model": "tiny" if args.tiny else "Llama-3-8B shapes",
        "device": args.device,
        "rank": RANK,
        "adapters": ADAPTERS,
        "prompt_tokens": args.prompt,
        "repeats": args.repeats,
    }
    path = report.write("first-token-tiny" if args.tiny else "first-token", workload, asdict(results))
    print(f"written to {path}")
    return results


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=24, help="requests of each case")
    parser.add_argument("--quick", action="store_true", help="8 requests of each case")
    add_arguments(parser)
    args = parser.parse_args(argv)
    args.prompt = 16 if args.tiny else 128
    if args.tiny or args.quick:
        args.repeats = 3 if args.tiny else ADAPTERS
    return args


class _Requests:
    """One request after the other, and what makes its case beforehand."""

    def __init__(self, client: Client, adapters: Sequence[str], prompt: int) -> None:
        self._client = client
        self._adapters = adapters
        self._prompt = prompt
        self._vocabulary = range(client.model().vocab_size)
        self._rng = random.Random(0)

    def measure(self, repeats: int) -> dict[str, Case]:
        """All cases in turn, again and again; the first turn warms up."""
        prepare: dict[str, Callable[[str], object]] = {
            "resident": lambda adapter: self._client.adapters.load(adapter),
            "host": self._evict_from_device,
            "cold": self._evict_from_host,
        }
        ttft: dict[str, list[float]] = {"base": [], **{name: [] for name in prepare}}
        loads: dict[str, list[LoadTimings]] = {"host": [], "cold": []}
        for turn in range(repeats + 1):
            adapter = self._adapters[turn % len(self._adapters)]
            ttft["base"].append(self._first_token(""))
            for name, act in prepare.items():
                act(adapter)
                ttft[name].append(self._first_token(adapter))
                if name in loads:
                    loads[name].append(self._client.adapters.get(adapter).last_load)
        return {
            name: Case(Percentiles.of(seconds[1:]), _medians(loads[name][1:]) if name in loads else None)
            for name, seconds in ttft.items()
        }

    def _first_token(self, adapter: str) -> float:
        """Seconds."""
        prompt = self._rng.choices(self._vocabulary, k=self._prompt)
        begin = time.perf_counter()
        stream = self._client.generate(
            prompt, adapter=adapter, max_tokens=OUTPUT, temperature=0, ignore_eos=True
        )
        next(stream)
        seconds = time.perf_counter() - begin
        if len([*stream]) > OUTPUT:
            raise SystemExit("bench.first_token: more messages than tokens")
        return seconds

    def _evict_from_device(self, adapter: str) -> None:
        self._wait_until_idle(adapter)
        self._client.adapters.evict(adapter, "device")

    def _evict_from_host(self, adapter: str) -> None:
        self._wait_until_idle(adapter)
        self._client.adapters.evict(adapter, "host")

    def _wait_until_idle(self, adapter: str) -> None:
        """A stream's last message comes a moment before its lease ends."""
        while self._client.adapters.get(adapter).leases:
            time.sleep(0.001)


def _medians(loads: Sequence[LoadTimings]) -> dict[str, float]:
    return {
        field.name: statistics.median(getattr(load, field.name) for load in loads)
        for field in LoadTimings.DESCRIPTOR.fields
        if field.name in STAGES
    }


def _show(results: FirstTokens) -> None:
    columns = ["", "p50", "p90", "p99", *(stage.removesuffix("_ms") for stage in STAGES)]
    rows = []
    for name, case in results.cases.items():
        times = [case.ttft.p50, case.ttft.p90, case.ttft.p99, *(case.load or {}).values()]
        rows.append([name, *(f"{ms:.1f}" for ms in times), *[""] * (len(columns) - 1 - len(times))])
    report.print_table("First token of an idle server, and the adapter's load, ms", columns, rows)
    print(f"ready {results.start_s:.1f} s after the command")


if __name__ == "__main__":
    main()
