"""A load that saturates a server, while more and more adapters are registered.

    python -m bench.many_adapters                    # Llama-3-8B shapes on the GPU; 5, 100, 1000 and 2000
    python -m bench.many_adapters --quick            # 5, 100 and 500, for shorter
    python -m bench.many_adapters --max-loras 256    # so many on the device; the others come and go
    python -m bench.many_adapters --tiny             # a tiny model on any device, to see that it runs

64 streams, each with one request after the other; prompts of 8 to 512 random tokens and as many of output,
greedy. Requests choose among all adapters that are registered by a power law with exponent 1, as in S-LoRA's
workloads (Sheng et al., 2023), or, with --uniform, each with the same probability. Adapters have rank 8 on
all seven linears. All that fit are loaded before the load begins; by default that is all. They share a few
files, so the disk takes little, but differ in their scale, and the device holds each in pages of its own.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench import report
from bench.load import Choice, ClosedLoop, Lengths, RequestMix
from bench.load_generator import LoadGenerator, LoadResult
from bench.random_server import (
    RandomCheckpoint,
    add_arguments,
    load_adapters,
    register_adapters,
    serve,
    write_checkpoint,
)
from bench.serve import show
from bench.server_process import ServerProcess
from deltaplane import Client

RANK = 8


@dataclass(frozen=True)
class Stage:
    """With so many adapters registered.

    register_s, load_s: seconds for those that are new since the stage before.
    loads: onto the device, while the load ran.
    """

    register_s: float
    load_s: float
    load: LoadResult
    loads: int


def main(argv: Sequence[str] | None = None) -> dict[int, Stage]:
    args = _parse(argv)
    checkpoint = write_checkpoint(args, adapters=max(args.numbers), rank=RANK)
    stages = _measure(args, checkpoint)
    _show(args, stages)
    workload = {
        "model": "tiny" if args.tiny else "Llama-3-8B shapes",
        "device": args.device,
        "rank": RANK,
        "choice": args.choice.value,
        "streams": args.streams,
        "prompt_tokens": str(args.lengths),
        "output_tokens": str(args.lengths),
        "max_loras": args.max_loras,
        "warmup_s": args.window[0],
        "seconds": args.window[1],
    }
    name = "many-adapters-tiny" if args.tiny else "many-adapters"
    print(f"written to {report.write(name, workload, _figures(stages))}")
    return stages


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numbers", type=int, nargs="+", help="of adapters, rising")
    parser.add_argument("--uniform", action="store_true", help="choose among adapters uniformly")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-loras", type=int, help="adapters on the device; default: all")
    parser.add_argument("--lora-host-memory", help="of the server, for adapters")
    parser.add_argument("--quick", action="store_true", help="5, 100 and 500 adapters, and 8 seconds of each")
    parser.add_argument("--clients", type=int, help="processes; default: half of the cores, at most 8")
    add_arguments(parser)
    args = parser.parse_args(argv)
    default = [2, 6] if args.tiny else [5, 100, 500] if args.quick else [5, 100, 1000, 2000]
    args.numbers = sorted(args.numbers or default)
    args.max_loras = args.max_loras or max(args.numbers)
    args.window = (0.5, 1.0) if args.tiny else (4.0, 8.0) if args.quick else (6.0, 15.0)
    args.lengths = Lengths(4, 16) if args.tiny else Lengths(8, 512)
    args.streams = 4 if args.tiny else args.streams
    args.choice = Choice.UNIFORM if args.uniform else Choice.ZIPF
    return args


def _measure(args: argparse.Namespace, checkpoint: RandomCheckpoint) -> dict[int, Stage]:
    flags = ["--max-loras", str(args.max_loras), "--max-lora-rank", str(RANK)]
    flags += ["--max-num-seqs", str(args.streams), "--max-num-batched-tokens", "2048"]
    if args.lora_host_memory:
        flags += ["--lora-host-memory", args.lora_host_memory]
    stages: dict[int, Stage] = {}
    with serve(args, checkpoint, *flags) as server, LoadGenerator(server.address, args.clients) as generator:
        known = 0
        for number in args.numbers:
            new = dict(islice(checkpoint.adapters.items(), known, number))
            names = tuple(islice(checkpoint.adapters, number))
            stages[number] = _stage(args, server, generator, names, new)
            known = number
    return stages


def _stage(
    args: argparse.Namespace,
    server: ServerProcess,
    generator: LoadGenerator,
    names: tuple[str, ...],
    new: Mapping[str, Path],
) -> Stage:
    """names: of all adapters. new: those of them that the server does not know yet."""
    number = len(names)
    register_s = register_adapters(server, new)
    print(f"{number}: registered after {register_s:.1f} s", flush=True)
    room = max(0, args.max_loras - (number - len(new)))
    load_s = load_adapters(server, islice(new, room))
    print(f"{number}: loaded after {load_s:.1f} s", flush=True)
    with Client(server.address, server.admin_address) as client:
        vocab_size = client.model().vocab_size
        before = _loads(client)
        mix = RequestMix(vocab_size, args.lengths, args.lengths, names, args.choice)
        load = generator.run(mix, ClosedLoop(args.streams, *args.window), seed=number)
        print(f"{number}: {load.tokens_per_s:.0f} tokens/s", flush=True)
        return Stage(register_s, load_s, load, _loads(client) - before)


def _loads(client: Client) -> int:
    """How often an adapter has been brought to the device."""
    return sum(adapter.loads for adapter in client.adapters.list(page_size=1000))


def _figures(stages: dict[int, Stage]) -> dict[str, Any]:
    fewest = stages[min(stages)].load.tokens_per_s
    return {
        str(number): {
            **stage.load.as_dict(),
            "of_fewest": stage.load.tokens_per_s / fewest,
            "loads": stage.loads,
            "register_s": stage.register_s,
            "load_s": stage.load_s,
        }
        for number, stage in stages.items()
    }


def _show(args: argparse.Namespace, stages: dict[int, Stage]) -> None:
    fewest = stages[min(stages)].load.tokens_per_s
    report.print_table(
        f"Rank {RANK}, {args.streams} streams, {args.choice.value}",
        ["adapters", "of the throughput with fewest", "loads meanwhile", "registered, s", "loaded, s"],
        [
            [
                str(number),
                f"{100 * stage.load.tokens_per_s / fewest:.1f} %",
                str(stage.loads),
                f"{stage.register_s:.1f}",
                f"{stage.load_s:.1f}",
            ]
            for number, stage in stages.items()
        ],
    )
    show("The load", {str(number): stage.load for number, stage in stages.items()})


if __name__ == "__main__":
    main()
