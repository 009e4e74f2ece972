"""The yardstick of front_door.py: what the engine itself makes of the same requests, in a process of its own.

Reads a job as JSON from standard input and writes figures as JSON to standard output:
{"rows": [[batch, adapters], ...], "rank", "prompt", "output", "repeats", "tiny", "device"} to
{"batch,adapters": {"tokens_per_s", "prefill_ms", "step_ms"}}. As in bench.decode there is no tokenizer and no
network; LoRA is enabled in all rows, as it is on the server.
"""

import contextlib
import json
import sys
from typing import Any

import torch

from bench.decode import Figures, Row, Workload, measure_rows
from bench.random_model import LLAMA_3_8B, TINY
from deltaplane_server.execution.device import resolve_device


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    device = resolve_device(job["device"])
    work = Workload(
        model=TINY if job["tiny"] else LLAMA_3_8B,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        device=device,
        prompt=job["prompt"],
        output=job["output"],
        repeats=job["repeats"],
    )
    rows = [Row(batch, adapters, job["rank"]) for batch, adapters in job["rows"]]
    with contextlib.redirect_stdout(sys.stderr):
        figures = measure_rows(work, rows)
    json.dump({row.key: _rate(row, figures[row.title], work.output) for row in rows}, sys.stdout)


def _rate(row: Row, figures: Figures, output: int) -> dict[str, float]:
    total_ms = figures.prefill_ms + figures.step_ms * (output - 1)
    return {
        "tokens_per_s": row.batch * output / total_ms * 1e3,
        "prefill_ms": figures.prefill_ms,
        "step_ms": figures.step_ms,
    }


if __name__ == "__main__":
    main()
