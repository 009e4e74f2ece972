"""A catalogue of ten thousand adapters: registered, listed, scraped, and found again after a restart.

    python -m bench.catalogue           # 10,000 adapters on a server of a tiny random model, on the CPU
    python -m bench.catalogue --tiny    # a few, to see that it runs

The adapters are PEFT folders of rank 8 that share a few files of weights through hard links, and differ in
their alpha; none of them is loaded. 32 calls of RegisterAdapter are under way at a time, each of which the
server reads, hashes, checks and writes to its SQLite file. Milliseconds are the client's, in the p50 and the
highest. Memory is the growth of the server's resident set: while it registers, once it is warm, and of a
server that is started again, over one that is started with an empty catalogue.
"""

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from bench import random_server, report
from bench.server_process import ServerProcess
from deltaplane.v1 import adapters_pb2 as pb
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceStub

if TYPE_CHECKING:
    from deltaplane.v1.adapters_pb2_grpc import AdapterServiceAsyncStub

RANK = 8
TEAMS = 10
PAGE_SIZES = {"default": 0, "largest": 1000}
FILTERS = {"name": "name:rank-8-00*", "label": "labels.team=team-3", "state": "state=FAILED"}
SCRAPES = 20
CALLS_AT_ONCE = 32

MIN_RATE = 200.0
MAX_PAGE_MS = 50.0
MAX_RESTORE_MS = 2000.0
MAX_BYTES = 4096.0


@dataclass(frozen=True)
class Times:
    """Milliseconds of some calls of one kind."""

    p50: float
    highest: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        return cls(1e3 * report.percentile(seconds, 0.5), 1e3 * max(seconds), len(seconds))


@dataclass(frozen=True)
class Registering:
    """per_second: of registrations. bytes: of memory that an adapter took."""

    per_second: float
    call: Times
    bytes: float


@dataclass(frozen=True)
class Restart:
    """restore_ms: what the server says that reading the catalogue took. ready_s, ready_empty_s: from the
    command to ready. bytes: of memory that an adapter takes."""

    restore_ms: float
    ready_s: float
    ready_empty_s: float
    bytes: float


@dataclass(frozen=True)
class Figures:
    """pages: by page size, and then by filter, of default size."""

    registering: Registering
    pages: Mapping[str, Times]
    scrape: Times
    restart: Restart


def main(argv: Sequence[str] | None = None) -> Figures:
    args = _parse(argv)
    model = argparse.Namespace(tiny=True, device="cpu", layers=None, checkpoints=args.checkpoints)
    checkpoint = random_server.write_checkpoint(model, adapters=args.adapters, rank=RANK)
    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder) / "catalogue.db")
        flags = ("--state", state, "--log-level", "info", "--log-format", "json")
        serve = partial(random_server.serve, model, checkpoint, *flags)
        with serve() as server:
            empty_bytes = _resident_bytes(server.pid)
            ready_empty_s = server.ready_s
            registering = _register(server, checkpoint.adapters, args.adapters // 20)
            pages = asyncio.run(_list_all(server.admin_address, len(checkpoint.adapters)))
            scrape = _scrape(server.http_address, len(checkpoint.adapters))
        with serve() as server:
            grown = _resident_bytes(server.pid) - empty_bytes
            restart = Restart(
                _restore_ms(server.log, len(checkpoint.adapters)),
                server.ready_s,
                ready_empty_s,
                grown / len(checkpoint.adapters),
            )
    figures = Figures(registering, pages, scrape, restart)
    _show(figures, len(checkpoint.adapters))
    workload = {"adapters": args.adapters, "rank": RANK, "calls_at_once": CALLS_AT_ONCE, "filters": FILTERS}
    path = report.write("catalogue-tiny" if args.tiny else "catalogue", workload, asdict(figures))
    print(f"written to {path}")
    return figures


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--adapters", type=int, help="default: 10,000")
    parser.add_argument("--tiny", action="store_true", help="40 adapters")
    parser.add_argument("--checkpoints", type=Path, default=random_server.CHECKPOINTS)
    args = parser.parse_args(argv)
    args.adapters = args.adapters or (40 if args.tiny else 10_000)
    return args


def _register(server: ServerProcess, adapters: Mapping[str, Path], num_first: int) -> Registering:
    """Registers all adapters. Memory and time count from when the first ones have warmed the server up."""
    first, rest = islice(adapters.items(), num_first), islice(adapters.items(), num_first, None)
    asyncio.run(_register_all(server.admin_address, list(first)))
    before = _resident_bytes(server.pid)
    begin = time.perf_counter()
    seconds = asyncio.run(_register_all(server.admin_address, list(rest)))
    per_second = len(seconds) / (time.perf_counter() - begin)
    grown = _resident_bytes(server.pid) - before
    return Registering(per_second, Times.of(seconds), grown / len(seconds))


async def _register_all(address: str, adapters: Sequence[tuple[str, Path]]) -> list[float]:
    """Seconds of each call."""
    waiting = enumerate(adapters)
    seconds: list[float] = []

    async def register(stub: "AdapterServiceAsyncStub") -> None:
        for number, (name, path) in waiting:
            labels = {"team": f"team-{number % TEAMS}"}
            request = pb.RegisterAdapterRequest(name=name, source=str(path), labels=labels)
            begin = time.perf_counter()
            await stub.RegisterAdapter(request)
            seconds.append(time.perf_counter() - begin)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = AdapterServiceStub(channel)
        await asyncio.gather(*(register(stub) for _ in range(CALLS_AT_ONCE)))
    return seconds


async def _list_all(address: str, expected: int) -> dict[str, Times]:
    """Reads the list to its end, once for each page size and for each filter."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = AdapterServiceStub(channel)
        pages = {name: await _pages(stub, size, "", expected) for name, size in PAGE_SIZES.items()}
        return pages | {name: await _pages(stub, 0, filter) for name, filter in FILTERS.items()}


async def _pages(
    stub: "AdapterServiceAsyncStub", page_size: int, filter: str, expected: int | None = None
) -> Times:
    seconds = []
    token, seen = "", 0
    while True:
        request = pb.ListAdaptersRequest(page_size=page_size, page_token=token, filter=filter)
        begin = time.perf_counter()
        page = await stub.ListAdapters(request)
        seconds.append(time.perf_counter() - begin)
        seen += len(page.adapters)
        token = page.next_page_token
        if not token:
            break
    if seen != page.total_size or expected not in (None, seen):
        raise SystemExit(f"bench.catalogue: a list {filter!r} had {seen} adapters of {page.total_size}")
    return Times.of(seconds)


def _scrape(address: str, expected: int) -> Times:
    """Reads /metrics several times, and checks the number of registered adapters there."""
    seconds = []
    for _ in range(SCRAPES):
        begin = time.perf_counter()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        seconds.append(time.perf_counter() - begin)
        if f'deltaplane_adapters{{state="registered"}} {expected:.1f}' not in text:
            raise SystemExit("bench.catalogue: /metrics does not count the adapters")
    return Times.of(seconds)


def _restore_ms(log: Path, expected: int) -> float:
    """What the server logged of the catalogue that it found."""
    lines = map(json.loads, log.read_text().splitlines())
    restored = next(line for line in lines if line["message"] == "catalogue.restored")
    if restored["adapters"] != expected:
        raise SystemExit(f"bench.catalogue: {restored['adapters']} adapters were found again of {expected}")
    return float(restored["ms"])


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process (VmRSS), in bytes."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def _show(figures: Figures, num_adapters: int) -> None:
    registering, restart = figures.registering, figures.restart
    below = f"< {MAX_PAGE_MS:.0f}"
    rows = [
        ["registrations a second", f"{registering.per_second:.0f}", f"> {MIN_RATE:.0f}"],
        ["one of 32 registrations at once, ms", _milliseconds(registering.call), ""],
        *([f"page of a list, {name}, ms", _milliseconds(t), below] for name, t in figures.pages.items()),
        ["scrape of /metrics, ms", _milliseconds(figures.scrape), ""],
        ["start-up adds, ms", f"{restart.restore_ms:.0f}", f"< {MAX_RESTORE_MS:.0f}"],
        ["ready without / with the catalogue, s", f"{restart.ready_empty_s:.2f} / {restart.ready_s:.2f}", ""],
        ["bytes an adapter, registered here", f"{registering.bytes:.0f}", f"< {MAX_BYTES:.0f}"],
        ["bytes an adapter, after a restart", f"{restart.bytes:.0f}", f"< {MAX_BYTES:.0f}"],
    ]
    report.print_table(f"{num_adapters} adapters, p50 / highest", ["", "measured", "aim"], rows)


def _milliseconds(times: Times) -> str:
    return f"{times.p50:.1f} / {times.highest:.1f}"


if __name__ == "__main__":
    main()
