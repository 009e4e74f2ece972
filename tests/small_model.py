"""The real small model, fetched once as the demo fetches it."""

import functools
import subprocess
import sys
from pathlib import Path

FETCH = Path(__file__).resolve().parents[1] / "examples" / "models" / "fetch_model.py"


@functools.cache
def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; takes a minute the first time on a machine."""
    done = subprocess.run([sys.executable, str(FETCH)], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])
