"""A real `deltaplane serve` process on free ports, for tests that need the whole server."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Served:
    """A running server. address, admin_address, http_address: host:port of its three ports."""

    process: "subprocess.Popen[bytes]"
    address: str
    admin_address: str
    http_address: str
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """The value of one Prometheus sample; its labels may be more than those given."""
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=30) as response:
            text = response.read().decode()
        for line in text.splitlines():
            if match := re.fullmatch(rf"{re.escape(name)}(?:{{(.*)}})? (\S+)", line):
                found = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
                if labels.items() <= found.items():
                    return float(match[2])
        raise AssertionError(f"no sample {name} {labels} in\n{text}")


@contextmanager
def served(
    model: Path,
    folder: Path,
    *flags: str,
    adapters: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Starts a server, waits until it is ready and stops it at the end.

    folder: where its log and the file of its ports go. adapters: registered at start, by name.
    """
    ports_file, log = folder / "ports.json", folder / "server.log"
    ports_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "deltaplane_server", "serve", str(model), "--state", ":memory:"]
    command += ["--host", "127.0.0.1", "--http-host", "127.0.0.1", "--ports-file", str(ports_file)]
    command += ["--port", "0", "--admin-port", "0", "--http-port", "0", "--threads", "1", *flags]
    if adapters:
        command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    try:
        ports = _ports(process, ports_file, log)
        yield Served(
            process,
            f"127.0.0.1:{ports['port']}",
            f"127.0.0.1:{ports['admin_port']}",
            f"127.0.0.1:{ports['http_port']}",
            log,
        )
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _ports(process: "subprocess.Popen[bytes]", ports_file: Path, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while not ports_file.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    ports: dict[str, Any] = json.loads(ports_file.read_text())
    return ports
