"""Tokens per second through gRPC, against what the engine itself makes of the same requests.

    python -m bench.through_grpc                       # Llama-3-8B shapes in bfloat16 on the GPU, all rows
    python -m bench.through_grpc --rows 64,0 256,0     # some rows, by streams and distinct adapters
    python -m bench.through_grpc --quick               # fewer tokens, one repeat
    python -m bench.through_grpc --tiny                # a tiny model on any device, to see that it runs

B streams start at once, each with a prompt of 128 random tokens and 256 tokens of output, greedy; D distinct
adapters of rank 16 on all linears go round among them. The engine makes them in one process, as in
bench.decode; then a server does, with the same limits, for clients in processes of their own. Time is from
the first request to the last token, prompts included.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.load import Burst, Lengths, RequestMix
from bench.load_generator import LoadGenerator, LoadResult
from bench.random_server import RandomCheckpoint, add_arguments, bring_adapters, serve, write_checkpoint
from bench.serve import show
from deltaplane import Client

RANK = 16
ROWS = ("64,0", "64,64", "256,0", "256,64")
TINY_ROWS = ("2,0", "4,2")


@dataclass(frozen=True)
class Comparison:
    """Of one row. engine: tokens per second in one process. grpc: each repeat through gRPC."""

    engine: float
    grpc: list[LoadResult]

    @property
    def middle(self) -> LoadResult:
        """The repeat with the median rate."""
        return sorted(self.grpc, key=lambda result: result.tokens_per_s)[len(self.grpc) // 2]

    @property
    def ratio(self) -> float:
        """Tokens per second through gRPC, the median, of the engine's own."""
        return statistics.median(result.tokens_per_s for result in self.grpc) / self.engine


def main(argv: Sequence[str] | None = None) -> dict[str, Comparison]:
    args = _parse(argv)
    engine = _engine_rates(args)
    checkpoint = write_checkpoint(args, adapters=max(adapters for _, adapters in args.rows), rank=RANK)
    grpc = _grpc_rates(args, checkpoint)
    results = {key: Comparison(engine[key]["tokens_per_s"], grpc[key]) for key in grpc}
    _show(results)
    workload = {
        "prompt_tokens": args.prompt,
        "output_tokens": args.output,
        "rank": RANK,
        "repeats": args.repeats,
        "model": "tiny" if args.tiny else "Llama-3-8B shapes",
        "device": args.device,
    }
    figures = {
        key: {
            "engine": engine[key],
            "grpc": [result.as_dict() for result in row.grpc],
            "ratio": row.ratio,
        }
        for key, row in results.items()
    }
    path = report.write("through-grpc-tiny" if args.tiny else "through-grpc", workload, figures)
    print(f"written to {path}")
    return results


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", metavar="B,D", help="streams and distinct adapters; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="64 output tokens and one repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, help="processes; default: half of the cores, at most 8")
    add_arguments(parser)
    args = parser.parse_args(argv)
    keys = args.rows or (TINY_ROWS if args.tiny else ROWS)
    args.rows = [tuple(int(number) for number in key.split(",")) for key in keys]
    args.prompt, args.output = (16, 9) if args.tiny else (128, 64 if args.quick else 256)
    if args.tiny or args.quick:
        args.repeats = 1
    return args


def _engine_rates(args: argparse.Namespace) -> dict[str, Any]:
    job = {"rank": RANK, **{key: getattr(args, key) for key in ("rows", "prompt", "output", "repeats")}}
    done = subprocess.run(
        [sys.executable, "-m", "bench.engine_rate"],
        input=json.dumps(job | {"tiny": args.tiny, "device": args.device}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rates: dict[str, Any] = json.loads(done.stdout)
    return rates


def _grpc_rates(args: argparse.Namespace, checkpoint: RandomCheckpoint) -> dict[str, list[LoadResult]]:
    streams = max(batch for batch, _ in args.rows)
    limits = {
        "--max-num-seqs": streams,
        "--max-num-batched-tokens": max(8192, streams),
        "--max-loras": max(1, len(checkpoint.adapters)),
        "--max-lora-rank": RANK,
    }
    flags = [str(word) for flag in limits.items() for word in flag]
    with serve(args, checkpoint, *flags) as server, LoadGenerator(server.address, args.clients) as generator:
        bring_adapters(server, checkpoint.adapters)
        with Client(server.address) as client:
            vocab_size = client.model().vocab_size
        names = tuple(checkpoint.adapters)
        return {
            f"{batch},{adapters}": _bursts(generator, args, batch, vocab_size, names[:adapters])
            for batch, adapters in args.rows
        }


def _bursts(
    generator: LoadGenerator, args: argparse.Namespace, batch: int, vocab_size: int, names: tuple[str, ...]
) -> list[LoadResult]:
    """The repeats, after one short burst to warm up."""
    prompt = Lengths(args.prompt, args.prompt)
    generator.run(RequestMix(vocab_size, prompt, Lengths(4, 4), names), Burst(batch))
    mix = RequestMix(vocab_size, prompt, Lengths(args.output, args.output), names)
    results = [generator.run(mix, Burst(batch), seed=repeat) for repeat in range(args.repeats)]
    for result in results:
        if result.errors:
            raise SystemExit(f"bench.through_grpc: streams did not end as they should: {result.errors}")
    return results


def _show(results: dict[str, Comparison]) -> None:
    report.print_table(
        "Tokens per second",
        ["streams, adapters", "engine", "gRPC", "gRPC / engine"],
        [
            [key, f"{row.engine:.0f}", f"{row.middle.tokens_per_s:.0f}", f"{100 * row.ratio:.1f} %"]
            for key, row in results.items()
        ],
    )
    show("Through gRPC", {key: row.middle for key, row in results.items()})


if __name__ == "__main__":
    main()
