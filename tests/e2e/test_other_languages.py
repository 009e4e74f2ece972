"""The example programs of the TypeScript and Go clients against a real server."""

import ast
import itertools
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltaplane import Client
from peft_factory import make_adapter, make_tiny_model
from serving import Served, served

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ("legal-brief", "creative-story")
QUESTION = "What is the sea like?"
MAX_TOKENS = 200
PATIENCE_S = 120


@dataclass(frozen=True)
class Program:
    """An example program, the target that builds it, and how to read a text that it prints."""

    command: list[str]
    target: str
    read_text: Callable[[str], str]
    finished: str
    flag: str


PROGRAMS = {
    "typescript": Program(
        command=["node", str(ROOT / "clients/typescript/dist/examples/two_adapters.js")],
        target="make examples-typescript",
        read_text=json.loads,
        finished="LENGTH",
        flag="--",
    ),
    "go": Program(
        command=[str(ROOT / "build/go/two_adapters")],
        target="make examples-go",
        read_text=ast.literal_eval,
        finished="FINISH_REASON_LENGTH",
        flag="-",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("other-languages")
    model = make_tiny_model(folder, "llama")
    adapters = {
        name: make_adapter(model, folder / name, rank=rank, seed=rank)
        for name, rank in zip(ADAPTERS, (4, 8), strict=True)
    }
    with served(model, folder, "--max-loras", "3", adapters=adapters) as server:
        yield server


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    if request.param in os.environ.get("SKIP_LANGUAGES", "").split():
        pytest.skip("left out by SKIP_LANGUAGES")
    program = PROGRAMS[request.param]
    if not Path(program.command[-1]).exists():
        pytest.fail(f"{program.command[-1]} is not there: run `{program.target}`, as `make test` does")
    return program


def run(program: Program, server: Served, *words: str) -> "subprocess.CompletedProcess[str]":
    options = [f"{program.flag}address", server.address, f"{program.flag}admin-address", server.admin_address]
    return subprocess.run(
        [*program.command, *options, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_two_adapters_stream_at_once_and_the_slots_are_listed(program: Program, server: Served) -> None:
    done = run(program, server, f"{program.flag}max-tokens", str(MAX_TOKENS), QUESTION)
    assert (done.returncode, done.stderr) == (0, "")

    texts: dict[str, str] = defaultdict(str)
    order, slots, facts = [], {}, set()
    for line in done.stdout.splitlines():
        name, _, rest = line.partition(": ")
        if name in ADAPTERS:
            texts[name] += program.read_text(rest)
            order.append(name)
        elif name.startswith("slot "):
            slots[name] = rest
        else:
            facts.add(line)

    with Client(server.address, server.admin_address) as client:
        expected = {
            name: client.generate_text(
                [{"role": "user", "content": QUESTION}], adapter=name, temperature=0, max_tokens=MAX_TOKENS
            )
            for name in ADAPTERS
        }
    assert texts == expected
    assert texts[ADAPTERS[0]] != texts[ADAPTERS[1]]
    assert facts == {
        f"{name} {fact}"
        for name in ADAPTERS
        for fact in (f"finished: {program.finished}", f"tokens: {MAX_TOKENS}")
    }
    switches = sum(before != after for before, after in itertools.pairwise(order))
    assert switches > 1, "the streams came one after the other"
    assert sorted(slots) == ["slot 0", "slot 1", "slot 2"]
    assert sorted(slots.values()) == sorted([*(f"{name} version 1" for name in ADAPTERS), "free"])


def test_an_error_of_the_server_is_one_line(program: Program, server: Served) -> None:
    done = run(program, server, f"{program.flag}first", "nobody", QUESTION)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("two_adapters: ")
    assert "nobody" in line
