"""deltaplane against transformers' generate on the small model: 8 streams of 64 tokens, through gRPC.

    python -m bench.cpu [--model FOLDER] [--lora-modules NAME=PATH NAME=PATH]

By default SmolLM2-135M-Instruct and the two adapters of examples/. Base only, and mixed (3 of one adapter,
3 of the other, 2 base). The server and transformers' generate run in processes of their own, one after the
other, twice round, so that both meet the machine in the same state; the best of all repeats counts. Also:
seconds from the command to ready, and the server's peak memory.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench import report
from bench.server_process import server_process
from deltaplane.v1 import generation_pb2, generation_pb2_grpc

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ADAPTERS = [f"{name}={EXAMPLES / 'adapters' / name}" for name in ("legal-brief", "creative-story")]
PROMPTS = (
    "The ship left the harbour before",
    "In the small village by the river there was",
    "Tell me about the weather in the mountains in spring",
    "My neighbour has a dog that",
    "The recipe needs two eggs, a cup of flour and",
    "Once the train had stopped, the passengers",
    "A letter arrived on Monday from",
    "The library keeps its oldest books in",
)


@dataclass(frozen=True)
class Burst:
    """All prompts sent at once. rate: tokens per second; ttft: median seconds to the first token."""

    rate: float
    ttft: float


@dataclass(frozen=True)
class Round:
    """What one life of the server showed."""

    ready_s: float
    peak_bytes: int
    base: list[Burst]
    mixed: list[Burst]


def main() -> None:
    args = _parse()
    adapters = dict(module.split("=", 1) for module in args.lora_modules)
    first, second = adapters
    mix = [first] * 3 + [second] * 3 + [""] * 2
    rounds, yardsticks = [], []
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}: deltaplane", flush=True)
        rounds.append(_serve_and_measure(args, mix))
        print(f"round {number + 1} of {args.rounds}: transformers and PEFT", flush=True)
        yardsticks.append(_transformers(args, adapters, mix))
    results = _results(rounds, yardsticks)
    _show(results)
    workload = {
        "model": Path(args.model).name,
        "adapters": list(adapters),
        "streams": len(PROMPTS),
        "tokens": args.tokens,
        "dtype": args.dtype,
        "server_threads": args.threads or "default",
        "repeats": args.repeats,
        "rounds": args.rounds,
        "mix": mix,
    }
    print(f"written to {report.write(f'cpu-{args.dtype}', workload, results)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct, fetched as the demo does")
    parser.add_argument("--lora-modules", nargs=2, default=ADAPTERS, metavar="NAME=PATH")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, help="of the server; default: its own")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    args.model = args.model or _fetch_model()
    return args


def _fetch_model() -> str:
    script = EXAMPLES / "models" / "fetch_model.py"
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def _serve_and_measure(args: argparse.Namespace, mix: list[str]) -> Round:
    flags = ["--lora-modules", *args.lora_modules, "--dtype", args.dtype]
    if args.threads:
        flags += ["--threads", str(args.threads)]
    with server_process(args.model, *flags) as server:
        base, mixed = asyncio.run(_take_turns(server.address, ([""] * len(mix), mix), args))
        return Round(server.ready_s, _peak_bytes(server.pid), base, mixed)


async def _take_turns(
    address: str, loads: tuple[list[str], list[str]], args: argparse.Namespace
) -> tuple[list[Burst], list[Burst]]:
    """The bursts of two loads, after one warm-up of each. They alternate: a machine's pace drifts."""
    bursts: tuple[list[Burst], list[Burst]] = ([], [])
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for _ in range(args.repeats + 1):
            for adapters, done in zip(loads, bursts, strict=True):
                done.append(await _burst(stub, adapters, args.tokens))
    return bursts[0][1:], bursts[1][1:]


async def _burst(stub: Any, adapters: list[str], tokens: int) -> Burst:
    start = time.perf_counter()
    streams = [
        _stream(stub, prompt, adapter, tokens) for prompt, adapter in zip(PROMPTS, adapters, strict=True)
    ]
    first_tokens = await asyncio.gather(*streams)
    seconds = time.perf_counter() - start
    return Burst(tokens * len(adapters) / seconds, statistics.median(t - start for t in first_tokens))


async def _stream(stub: Any, prompt: str, adapter: str, tokens: int) -> float:
    """Runs one greedy stream to its end and answers when its first token came."""
    request = generation_pb2.GenerateRequest(
        text=prompt,
        adapter=adapter,
        sampling=generation_pb2.SamplingParams(temperature=0),
        stop=generation_pb2.StopCondition(max_tokens=tokens, ignore_eos=True),
    )
    first_token, made = 0.0, 0
    async for message in stub.Generate(request):
        first_token = first_token or time.perf_counter()
        made += len(message.token_ids)
    if made != tokens:
        raise SystemExit(f"the server made {made} tokens instead of the {tokens} asked for")
    return first_token


def _peak_bytes(pid: int) -> int:
    """Peak resident memory of a process (VmHWM), in bytes."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def _transformers(
    args: argparse.Namespace, adapters: dict[str, str], mix: list[str]
) -> dict[str, list[float]]:
    job = {
        "model": args.model,
        "dtype": args.dtype,
        "prompts": PROMPTS,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "adapters": adapters,
        "mix": mix,
    }
    done = subprocess.run(
        [sys.executable, "-m", "bench.transformers_generate"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, list[float]] = json.loads(done.stdout)
    return figures


def _results(rounds: list[Round], yardsticks: list[dict[str, list[float]]]) -> dict[str, Any]:
    base = [burst for r in rounds for burst in r.base]
    mixed = [burst for r in rounds for burst in r.mixed]
    ours = {"base": _rates(b.rate for b in base), "mixed": _rates(b.rate for b in mixed)}
    theirs = {name: _rates(rate for y in yardsticks for rate in y[name]) for name in ("base", "mixed")}
    return {
        "deltaplane": ours,
        "transformers": theirs,
        "mixed_over_base": {
            "of_best": ours["mixed"]["best"] / ours["base"]["best"],
            "median_of_pairs": statistics.median(m.rate / b.rate for b, m in zip(base, mixed, strict=True)),
        },
        "base_over_transformers": ours["base"]["best"] / theirs["base"]["best"],
        "ttft_s": {
            "base": statistics.median(b.ttft for b in base),
            "mixed": statistics.median(b.ttft for b in mixed),
        },
        "ready_s": [r.ready_s for r in rounds],
        "peak_bytes": max(r.peak_bytes for r in rounds),
    }


def _rates(rates: Iterator[float]) -> dict[str, Any]:
    values = list(rates)
    return {"best": max(values), "median": statistics.median(values), "all": values}


def _show(results: dict[str, Any]) -> None:
    rows = [
        [f"{server}, {load}", f"{rates['best']:.1f}", f"{rates['median']:.1f}"]
        for server in ("deltaplane", "transformers")
        for load, rates in results[server].items()
    ]
    report.print_table("Tokens per second (mixed in transformers is PEFT)", ["", "best", "median"], rows)
    report.print_table(
        "The server",
        ["", ""],
        [
            ["mixed / base, of the best", f"{results['mixed_over_base']['of_best']:.3f}"],
            ["mixed / base, median of pairs", f"{results['mixed_over_base']['median_of_pairs']:.3f}"],
            ["base / transformers", f"{results['base_over_transformers']:.3f}"],
            ["first token, 8 at once, base / mixed, ms", _ms_pair(results["ttft_s"])],
            ["ready after, s", " ".join(f"{s:.1f}" for s in results["ready_s"])],
            ["peak memory, GB", f"{results['peak_bytes'] / 1e9:.3f}"],
        ],
    )


def _ms_pair(ttft: dict[str, float]) -> str:
    return f"{ttft['base'] * 1e3:.0f} / {ttft['mixed'] * 1e3:.0f}"


if __name__ == "__main__":
    main()
