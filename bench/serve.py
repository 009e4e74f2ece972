"""A gRPC load on a server, and what its clients see of it: throughput, first tokens, time between tokens.

    python -m bench.serve --rate 10                     # Poisson arrivals on a random Llama-3-8B on the GPU
    python -m bench.serve --streams 64 --uniform        # a load that saturates it
    python -m bench.serve --tiny                        # a tiny model on any device, to see that it runs
    python -m bench.serve --address HOST:PORT --names legal-brief creative-story     # a server that runs

Without --address it starts a server on random weights, with the flags that stand behind "--", if any. Clients
are processes of their own; prompts are random token ids, ends of sequence are ignored. Adapters are chosen by
a power law with exponent 1: the k-th with a probability in proportion to 1 / k.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench import report
from bench.load import Arrivals, Choice, ClosedLoop, Lengths, Poisson, RequestMix
from bench.load_generator import LoadGenerator, LoadResult
from bench.random_server import add_arguments, bring_adapters, serve, write_checkpoint
from deltaplane import Client

RANK = 16


def main(argv: Sequence[str] | None = None) -> LoadResult:
    args = _parse(argv)
    with _server(args) as (address, names):
        mix = _mix(args, address, names)
        with LoadGenerator(address, args.clients) as generator:
            result = generator.run(mix, args.arrivals, seed=args.seed)
    show(f"{_title(args.arrivals)}, {_adapters(mix)}", {"": result})
    workload = {
        "arrivals": _title(args.arrivals),
        "warmup_s": args.arrivals.warmup_s,
        "adapters": _adapters(mix),
        "prompt_tokens": str(mix.prompt),
        "output_tokens": str(mix.output),
        "temperature": mix.temperature,
        "seed": args.seed,
        "server": args.address or ("tiny" if args.tiny else "Llama-3-8B shapes"),
    }
    path = report.write("serve-tiny" if args.tiny else "serve", workload, result.as_dict())
    print(f"written to {path}")
    return result


def show(title: str, results: dict[str, LoadResult]) -> None:
    """Prints a table with a row for each, and what was wrong."""
    columns = [
        "",
        "tokens/s",
        "requests/s",
        "messages/s",
        "first token, ms\np50 / p90 / p99",
        "between, ms\np50 / p90 / p99",
        "clients' CPUs",
        "busiest",
    ]
    rows = [
        [
            name,
            f"{r.tokens_per_s:.0f}",
            f"{r.requests_per_s:.1f}",
            f"{r.messages_per_s:.0f}",
            str(r.ttft),
            str(r.itl),
            f"{r.client_cpus:.1f}",
            f"{100 * r.busiest_client:.0f} %",
        ]
        for name, r in results.items()
    ]
    report.print_table(title, columns, rows)
    for name, r in results.items():
        if r.errors:
            print(f"{name}: streams that did not end as they should: {r.errors}")
        if r.is_client_bound:
            print(
                f"{name}: a client was busy for {100 * r.busiest_client:.0f} % of the time; give it more "
                "--clients"
            )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--address", help="of a server that runs; by default one is started")
    parser.add_argument(
        "--names", nargs="*", default=[], help="adapters of the server that runs; default: none"
    )
    parser.add_argument("--adapters", type=int, help="of rank 16, of the server that is started; default: 64")
    parser.add_argument("--uniform", action="store_true", help="choose among adapters uniformly")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, default=10.0, help="requests a second, as a Poisson process")
    load.add_argument("--streams", type=int, help="instead: so many, each with one request after the other")
    parser.add_argument("--prompt", type=Lengths.parse, default="8-512", help="tokens; one number or a range")
    parser.add_argument("--output", type=Lengths.parse, default="8-512", help="tokens; one number or a range")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seconds", type=float, help="that are measured; default: 20")
    parser.add_argument("--warmup", type=float, help="seconds before them; default: 5")
    parser.add_argument("--quick", action="store_true", help="8 seconds, after 3")
    parser.add_argument("--clients", type=int, help="processes; default: half of the cores, at most 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="of the server that is started, behind --")
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.names and not args.address:
        parser.error("--names are of a server that runs: give its --address, or --adapters instead")
    if args.address and (args.flags or args.adapters is not None):
        parser.error("--adapters and flags are for a server that is started: leave out --address")
    seconds, warmup = (1.0, 0.5) if args.tiny else (8.0, 3.0) if args.quick else (20.0, 5.0)
    window = args.warmup if args.warmup is not None else warmup, args.seconds or seconds
    args.arrivals = ClosedLoop(args.streams, *window) if args.streams else Poisson(args.rate, *window)
    if args.tiny:
        args.prompt, args.output = Lengths(4, 16), Lengths(4, 16)
    return args


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """The address of a server and the names of adapters that it has."""
    if args.address:
        yield args.address, args.names
        return
    number = args.adapters if args.adapters is not None else 4 if args.tiny else 64
    checkpoint = write_checkpoint(args, adapters=number, rank=RANK)
    lora = ["--max-loras", str(number)] if number else ["--no-enable-lora"]
    sizes = ["--max-num-seqs", str(args.streams or 256), "--max-num-batched-tokens", "2048"]
    with serve(args, checkpoint, *lora, *sizes, *args.flags) as server:
        bring_adapters(server, checkpoint.adapters)
        yield server.address, list(checkpoint.adapters)


def _mix(args: argparse.Namespace, address: str, names: Sequence[str]) -> RequestMix:
    with Client(address) as client:
        vocab_size = client.model().vocab_size
    choice = Choice.UNIFORM if args.uniform else Choice.ZIPF
    return RequestMix(vocab_size, args.prompt, args.output, tuple(names), choice, args.temperature)


def _title(arrivals: Arrivals) -> str:
    match arrivals:
        case ClosedLoop(streams=streams):
            return f"{streams} streams, one request after the other"
        case Poisson(rate=rate):
            return f"{rate:g} requests a second, Poisson"
    raise AssertionError(arrivals)


def _adapters(mix: RequestMix) -> str:
    return f"{len(mix.adapters)} adapters, {mix.choice.value}" if mix.adapters else "base model"


if __name__ == "__main__":
    main()
