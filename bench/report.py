"""What every benchmark writes: a table for people and JSON with all that is needed to repeat it."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("deltaplane", "torch", "transformers", "peft", "grpcio", "protobuf", "safetensors", "triton")
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, operating system, and the GPU where there is one."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory_kib = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": memory_kib * 1024,
        "os": platform.platform(),
        "python": platform.python_version(),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(name: str, workload: Mapping[str, Any], results: Mapping[str, Any]) -> Path:
    """Writes results/<name>.json and answers its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "workload": dict(workload),
        "results": dict(results),
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: the lowest value that at least this share of all do not exceed; NaN of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
