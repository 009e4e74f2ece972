"""The steps of the demo."""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from deltaplane.cli.main import main as deltactl
from examples.demo.processes import exit_on_sigterm, running

EXAMPLES = Path(__file__).resolve().parent.parent
ADAPTERS = ("legal-brief", "creative-story")
QUESTION = "What happened to the umbrella that I left on the train?"
TICK_S = 0.1
REPORT_EVERY_S = 3.0
START_PATIENCE_S = 300.0


class DemoError(Exception):
    """The demo cannot go on; the text says why, for people."""


def main() -> int:
    """Answers the exit code."""
    parser = argparse.ArgumentParser(prog="demo", description="Ask a base model and two adapters of it.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer (default: %(default)s)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    try:
        model = fetch_model()
        with serving(model):
            return ask(arguments.question, arguments.max_tokens) or show_slots()
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1


def fetch_model() -> str:
    """The model's folder. The fetcher says on standard error how far it is."""
    command = [sys.executable, str(EXAMPLES / "models" / "fetch_model.py")]
    with running(command, stop=signal.SIGINT) as fetcher:  # which leaves nothing half-made behind
        output, _ = fetcher.communicate()
    if fetcher.returncode != 0:
        raise DemoError("there is no model to serve")
    return output.splitlines()[-1]


@contextmanager
def serving(model: str) -> Iterator[None]:
    """Serves the model with both adapters on free ports, which deltactl finds in the environment."""
    with tempfile.TemporaryDirectory(prefix="deltaplane-demo-") as folder:
        ports_file, log = Path(folder, "ports.json"), Path(folder, "server.log")
        command = [sys.executable, "-m", "deltaplane_server", "serve", model]
        command += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
        command += ["--http-host", "127.0.0.1", "--http-port", "0", "--ports-file", str(ports_file)]
        command += ["--state", ":memory:", "--drain-timeout", "1"]
        command += ["--lora-modules", *(f"{name}={EXAMPLES / 'adapters' / name}" for name in ADAPTERS)]
        with log.open("wb") as output, running(command, output=output) as server:
            for seconds in waiting("starting the server"):
                if ports_file.exists():
                    break
                if server.poll() is not None:
                    lines = log.read_text(errors="replace").splitlines() or ["(it said nothing)"]
                    raise DemoError("the server ended before it was ready:\n  " + "\n  ".join(lines[-5:]))
                if seconds > START_PATIENCE_S:
                    raise DemoError(f"the server was not ready within {START_PATIENCE_S:.0f} s")
            ports = json.loads(ports_file.read_text())
            os.environ["DELTAPLANE_ADDRESS"] = f"127.0.0.1:{ports['port']}"
            os.environ["DELTAPLANE_ADMIN_ADDRESS"] = f"127.0.0.1:{ports['admin_port']}"
            yield


def ask(question: str, max_tokens: int) -> int:
    """All three at the same time, side by side, and what each request cost."""
    adapters = [word for name in ADAPTERS for word in ("--adapter", name)]
    return run(
        "generate",
        question,
        "--chat",
        "--base",
        *adapters,
        f"--max-tokens={max_tokens}",
        "--temperature=0",
        "--stats",
    )


def show_slots() -> int:
    """Where the adapters are now."""
    return run("slots")


def run(*words: str) -> int:
    """Shows a command of deltactl, and runs it."""
    print(f"\n$ deltactl {shlex.join(words)}\n", flush=True)
    return deltactl(words)


def waiting(what: str) -> Iterator[float]:
    """Yields the seconds so far, ten times a second, and shows them."""
    console, started, reported = Console(stderr=True), time.monotonic(), 0.0
    with console.status(what) as status:
        while True:
            seconds = time.monotonic() - started
            yield seconds
            status.update(f"{what} ... {seconds:.0f} s")
            if not console.is_terminal and seconds - reported > REPORT_EVERY_S:
                print(f"{what} ... {seconds:.0f} s", file=sys.stderr, flush=True)
                reported = seconds
            time.sleep(TICK_S)
