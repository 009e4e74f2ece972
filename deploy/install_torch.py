"""Installs the torch that this machine can use, into the Python that runs this.

    python deploy/install_torch.py

On Linux, PyPI's torch brings gigabytes of CUDA libraries. Without an NVIDIA driver they are waste: the CPU
build from PyTorch's own index does, where that index answers; else PyPI's, which runs on a CPU too.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import urllib.request
from pathlib import Path

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Install {TORCH}.")
    parser.add_argument(
        "--build", choices=["auto", "cpu", "cuda"], default="auto", help="auto asks for a driver"
    )
    build = parser.parse_args().build
    if is_installed():
        return 0
    wants_cpu = build == "cpu" or (build == "auto" and not has_nvidia_driver())
    if wants_cpu and sys.platform == "linux" and answers(f"{CPU_INDEX}/torch/"):
        if pip_install("--index-url", CPU_INDEX) == 0:
            return 0
        print(f"install_torch: {CPU_INDEX} failed; trying pip's own index", file=sys.stderr)
    return pip_install()


def is_installed() -> bool:
    """Whether this version is there, in whatever build."""
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return installed.partition("+")[0] == TORCH.partition("==")[2]


def has_nvidia_driver() -> bool:
    """Whether the kernel has one; on WSL the device is there instead."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/dxg").exists()


def answers(url: str) -> bool:
    """Whether a server answers there within PATIENCE_S."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S):
            return True
    except OSError:
        return False


def pip_install(*options: str) -> int:
    """pip's exit code."""
    return subprocess.call([sys.executable, "-m", "pip", "install", *options, TORCH])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
