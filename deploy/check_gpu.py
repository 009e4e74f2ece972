"""Says whether this Python can run the GPU tests and benchmarks from a checkout, and what it lacks.

python deploy/check_gpu.py
"""

import importlib.util
import sys

NEEDED = {
    "cuda.bindings": "cuda-bindings",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "peft": "peft",
    "prometheus_client": "prometheus-client",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "regex": "regex",
    "rich": "rich",
    "safetensors": "safetensors",
    "structlog": "structlog",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "uvloop": "uvloop",
}
"""Beside torch: the modules, and the packages that bring them."""


def main() -> int:
    problem = missing() or no_device()
    if problem:
        print(f"check_gpu: {problem}", file=sys.stderr)
        return 1
    return 0


def missing() -> str | None:
    """The packages that are not there, and how to get them."""
    packages = [package for module, package in NEEDED.items() if not is_there(module)]
    if not packages:
        return None
    return f"{sys.executable} lacks packages; run: {sys.executable} -m pip install {' '.join(packages)}"


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def no_device() -> str | None:
    """Why torch has no GPU to offer."""
    if not is_there("torch"):
        return f"{sys.executable} has no torch; name a Python that has one with GPU_PYTHON="
    import torch

    if torch.cuda.is_available():
        return None
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    return (
        f"torch {torch.__version__} of {sys.executable} ({build}) sees no CUDA device; run this on a machine "
        "with an NVIDIA GPU and driver, or name another Python with GPU_PYTHON="
    )


if __name__ == "__main__":
    sys.exit(main())
