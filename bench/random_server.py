"""A server of a random model, and random adapters of it, for benchmarks of the whole server.

What torch does, writing the checkpoint and serving it, is done by other processes: this one, and the load
clients that it starts, stay small, and the GPU is all the server's.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.server_process import ServerProcess, server_process
from deltaplane import AsyncAdapterClient

CHECKPOINTS = Path(__file__).resolve().parents[1] / "build" / "bench"
_CALLS_AT_ONCE = 32


@dataclass(frozen=True)
class RandomCheckpoint:
    """Folders of a model and of adapters, by name."""

    model: Path
    adapters: Mapping[str, Path]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is served, and on what."""
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of Llama-3-8B shapes")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; default: the first GPU")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument(
        "--checkpoints", type=Path, default=CHECKPOINTS, help="where random weights are kept (default: build)"
    )


def write_checkpoint(args: argparse.Namespace, *, adapters: int, rank: int) -> RandomCheckpoint:
    """The random model of the arguments and its adapters of one rank, written unless they are there."""
    what = ["--adapters", str(adapters), "--rank", str(rank), *(["--tiny"] if args.tiny else [])]
    if args.layers:
        what += ["--layers", str(args.layers)]
    written = args.checkpoints / f"{'-'.join(word.strip('-') for word in what)}.json"
    if not written.exists():
        command = [sys.executable, "-m", "bench.random_checkpoint", str(args.checkpoints), *what]
        done = subprocess.run([*command, "--device", args.device], stdout=subprocess.PIPE, check=True)
        written.write_bytes(done.stdout)
    paths = json.loads(written.read_text())
    adapter_paths = {name: Path(path) for name, path in paths["adapters"].items()}
    return RandomCheckpoint(Path(paths["model"]), adapter_paths)


def serve(
    args: argparse.Namespace, checkpoint: RandomCheckpoint, *flags: str
) -> AbstractContextManager[ServerProcess]:
    """A server of the checkpoint, from whose folder adapters may be registered."""
    flags = ("--device", args.device, "--log-level", "warning", *flags)
    return server_process(checkpoint.model, "--adapter-roots", str(checkpoint.model / "adapters"), *flags)


def bring_adapters(server: ServerProcess, adapters: Mapping[str, Path]) -> None:
    """Registers adapters through the control plane, and loads them onto the device."""
    register_adapters(server, adapters)
    load_adapters(server, adapters)


def register_adapters(server: ServerProcess, adapters: Mapping[str, Path]) -> float:
    """Registers adapters, many at once. Answers the seconds that it took."""

    async def register(client: AsyncAdapterClient, name: str) -> None:
        await client.register(name, str(adapters[name]))

    return asyncio.run(_for_each(server, adapters, register))


def load_adapters(server: ServerProcess, names: Iterable[str]) -> float:
    """Loads adapters onto the device, many at once. Answers the seconds that it took."""

    async def load(client: AsyncAdapterClient, name: str) -> None:
        await client.load(name)

    return asyncio.run(_for_each(server, names, load))


async def _for_each(
    server: ServerProcess, names: Iterable[str], call: Callable[[AsyncAdapterClient, str], Awaitable[None]]
) -> float:
    turns = asyncio.Semaphore(_CALLS_AT_ONCE)
    async with AsyncAdapterClient(server.admin_address) as client:

        async def take_turn(name: str) -> None:
            async with turns:
                await call(client, name)

        begin = time.perf_counter()
        await asyncio.gather(*map(take_turn, names))
        return time.perf_counter() - begin
