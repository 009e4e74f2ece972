"""A `deltaplane serve` process on free ports, for benchmarks that measure the whole server."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_START_S = 600.0
_POLL_S = 0.005
_STOP_S = 60.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that serves.

    address, admin_address, http_address: host:port of both planes, and of metrics and health.
    ready_s: seconds from the command to ready.
    log: the file that it writes to.
    """

    pid: int
    address: str
    admin_address: str
    http_address: str
    ready_s: float
    log: Path


@contextmanager
def server_process(model: Path | str, *flags: str) -> Iterator[ServerProcess]:
    """Starts a server with these flags beside the model, and stops it at the end of the block.

    Errors: SystemExit with the server's log, where it does not become ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        ports_file, log = Path(folder) / "ports.json", Path(folder) / "server.log"
        command = [
            sys.executable,
            "-m",
            "deltaplane_server",
            "serve",
            str(model),
            "--state",
            ":memory:",
            *flags,
        ]
        command += ["--host", "127.0.0.1", "--http-host", "127.0.0.1", "--ports-file", str(ports_file)]
        command += ["--port", "0", "--admin-port", "0", "--http-port", "0", "--drain-timeout", "0"]
        begin = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            while not ports_file.exists():
                if process.poll() is not None or time.perf_counter() - begin > _START_S:
                    raise SystemExit(f"bench: the server did not start\n{log.read_text()}")
                time.sleep(_POLL_S)
            ready_s = time.perf_counter() - begin
            ports = json.loads(ports_file.read_text())
            yield ServerProcess(
                pid=process.pid,
                address=f"127.0.0.1:{ports['port']}",
                admin_address=f"127.0.0.1:{ports['admin_port']}",
                http_address=f"127.0.0.1:{ports['http_port']}",
                ready_s=ready_s,
                log=log,
            )
        finally:
            process.terminate()
            process.wait(_STOP_S)
