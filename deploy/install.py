"""Makes a virtual environment with this project in it, editable, and the torch that the machine can use.

    python deploy/install.py .venv server,demo,dev

Ctrl-C ends it without a word; started again, it goes on where it was.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a virtual environment with this project in it.")
    parser.add_argument("folder", type=Path, help="of the environment")
    parser.add_argument("extras", help="of the project, such as server,demo")
    arguments = parser.parse_args()
    python = str(arguments.folder / "bin" / "python")
    try:
        for command in (
            [sys.executable, "-m", "venv", str(arguments.folder)],
            [python, str(ROOT / "deploy" / "install_torch.py")],
            [python, "-m", "pip", "install", "--editable", f"{ROOT}[{arguments.extras}]"],
        ):
            print(f"$ {' '.join(command)}", flush=True)
            if (code := run(command)) != 0:
                return code
    except KeyboardInterrupt:
        return 130
    return 0


def run(command: Sequence[str]) -> int:
    """The command's exit code. It has a process group of its own, which Ctrl-C here ends as a whole."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise


if __name__ == "__main__":
    sys.exit(main())
