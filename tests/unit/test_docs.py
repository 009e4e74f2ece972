"""What the README says exists: commands, flags, RPCs, code."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from deltaplane.cli.main import argument_parser as deltactl_parser
from deltaplane.v1 import adapters_pb2, generation_pb2
from deltaplane_server.cli import argument_parser as server_parser

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.findall(r"^    (.+)$", README.replace("\\\n", " "), re.MULTILINE)
]


def commands(program: str) -> list[list[str]]:
    return [words[1:] for words in COMMANDS if words[:1] == [program]]


@pytest.mark.parametrize("words", commands("deltactl"), ids=" ".join)
def test_the_commands_of_deltactl_are_ones_that_it_has(words: list[str]) -> None:
    assert callable(deltactl_parser().parse_args(words).command)


@pytest.mark.parametrize("words", commands("deltaplane"), ids=" ".join)
def test_the_command_of_the_server_is_one_that_it_has(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert server_parser().parse_args(words).command == "serve"


def test_the_flags_are_ones_that_a_program_has() -> None:
    def flags(text: str) -> set[str]:
        return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))

    known = set()
    for module in (
        "deltaplane_server.cli",
        "deltaplane.cli.main",
        "deltaplane.cli.adapters",
        "deltaplane.cli.connection",
        "deltaplane.cli.server",
    ):
        known |= flags(Path(str(importlib.import_module(module).__file__)).read_text())
    table = README[README.index("| flag |") : README.index("## Call it")]
    prose = README[README.index("## The control plane") :]
    docker = {"--build", "--profile"}
    assert flags(table)
    assert flags(table) | flags(prose) <= known | docker


def test_all_rpcs_are_told() -> None:
    section = README[README.index("## The API") : README.index("## Adapters")]
    for proto in (generation_pb2, adapters_pb2):
        for service in proto.DESCRIPTOR.services_by_name.values():
            assert service.name in section
            assert {method.name for method in service.methods} <= set(re.findall(r"`(\w+)`", section))


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_what_the_python_code_imports_is_there(block: str) -> None:
    imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(str(node.module))
        assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_files_and_links_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    paths = re.findall(r"(?<![\w/])(?:clients|protos|examples|deploy)/[\w./-]*\w", README)
    assert links
    for path in links + paths:
        assert (ROOT / path).exists(), path
