"""Runs the cases of on_interpreter/ with Triton's interpreter, which needs no GPU.

In a process of its own: Triton reads the switch when it is imported. bfloat16 is left to tests/gpu, because
the interpreter's dot is wrong in it.
"""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "on_interpreter"


def test_kernels_on_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, sorted(CASES.glob("*.py")))],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stdout + run.stderr
