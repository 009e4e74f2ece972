"""`deltaplane serve` as a process: its life, its exit codes, and the one line on stderr."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltaplane_server.app import running_server
from deltaplane_server.startup import StartupError
from fake_backend import server_config
from peft_factory import make_adapter, make_tiny_model

PATIENCE_S = 120


def command(*arguments: object) -> list[str]:
    ports = ("--port", "0", "--admin-port", "0", "--http-port", "0")
    local = ("--host", "127.0.0.1", "--http-host", "127.0.0.1", "--state", ":memory:", "--threads", "1")
    return [sys.executable, "-m", "deltaplane_server", "serve", *map(str, arguments), *local, *ports]


@contextmanager
def process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that is gone at the end."""
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def refusal(*arguments: object) -> str:
    """The one line on stderr of a server that does not start."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


async def refusal_to_load(model: Path, **limits: Any) -> str:
    """The same without a process of its own, for what takes torch to find out."""
    config = server_config()
    config = replace(config, engine=replace(config.engine, model=str(model), **limits))
    with pytest.raises(StartupError) as caught:
        async with running_server(config):
            pass
    return str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def test_a_server_starts_serves_and_drains_at_sigterm(model: Path, tmp_path: Path) -> None:
    ports_file = tmp_path / "ports.json"
    adapter = make_adapter(model, tmp_path / "adapter", rank=4)
    arguments = command(
        model, "--lora-modules", f"one={adapter}", "--ports-file", ports_file, "--log-format", "json"
    )
    with process(*arguments) as server:
        deadline = time.monotonic() + PATIENCE_S
        while not ports_file.exists() and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        port = json.loads(ports_file.read_text())["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0
    assert errors == ""
    events = [json.loads(line) for line in output.splitlines()]
    messages = [event["message"] for event in events]
    assert messages.index("server.memory") < messages.index("adapter.loaded") < messages.index("server.ready")
    assert messages[-1] == "server.stopped"
    [ready] = [event for event in events if event["message"] == "server.ready"]
    assert ready["data_plane"] == f"127.0.0.1:{port}"


def test_a_missing_model_folder() -> None:
    assert "MODEL /no/such/model: there is no such folder" in refusal("/no/such/model")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "there is no config.json in it" in refusal(tmp_path)


async def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    message = await refusal_to_load(tmp_path)
    assert "BertModel" in message
    assert "LlamaForCausalLM" in message


async def test_more_kv_than_memory(model: Path) -> None:
    message = await refusal_to_load(model, kv_cache_bytes=1 << 60)
    assert message.startswith("--kv-cache-memory: more KV than memory")
    assert "GiB are available" in message


async def test_a_model_longer_than_it_knows(model: Path) -> None:
    message = await refusal_to_load(model, max_model_len=1 << 20)
    assert message.startswith("--max-model-len: 1048576 is not served, the limit is 512")


def test_a_control_plane_that_would_ask_nobody(tmp_path: Path) -> None:
    message = refusal(tmp_path, "--admin-host", "0.0.0.0")
    assert "--admin-host 0.0.0.0 is not a loopback address" in message
    assert "--admin-token-file" in message


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    message = refusal(tmp_path, "--admin-host", "0.0.0.0", "--admin-token-file", tmp_path / "none")
    assert f"--admin-token-file {tmp_path}/none: it cannot be read (No such file or directory)" in message


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        done = subprocess.run(
            [*command(tmp_path), "--port", str(taken)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert f"--port 127.0.0.1:{taken}: the port is in use" in done.stderr


SIGNALLED = """
import asyncio
from deltaplane_server.signals import StopSignals

async def main():
    signals = StopSignals()
    {start}
    print("ready", flush=True)
    await signals.wait()
    print("asked", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    with process(sys.executable, "-c", SIGNALLED.format(start="signals.server_started()")) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        server.send_signal(number)
        assert server.stdout.readline() == "asked\n"
        server.send_signal(number)
        assert server.wait(PATIENCE_S) == 128 + number


def test_a_signal_while_the_server_starts_ends_at_once() -> None:
    with process(sys.executable, "-c", SIGNALLED.format(start="")) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 128 + signal.SIGTERM
