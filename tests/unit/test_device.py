"""Where the model runs and in which numbers."""

import pytest
import torch

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.execution.device import resolve_device, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def test_devices() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto") == (CUDA if torch.cuda.is_available() else CPU)


@pytest.mark.parametrize("name", ["", "gpu", "mps", "cuda:x"])
def test_a_device_that_is_not_known(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"device: .* use auto, cpu, cuda or cuda:N"):
        resolve_device(name)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InvalidArgumentError, match="device: 'cuda:99' is not there"):
        resolve_device("cuda:99")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", CPU, torch.float32),
        ("auto", CUDA, torch.bfloat16),
        ("float32", CUDA, torch.float32),
        ("bfloat16", CPU, torch.bfloat16),
        ("float16", CUDA, torch.float16),
    ],
)
def test_dtypes(name: str, device: torch.device, expected: torch.dtype) -> None:
    assert resolve_dtype(name, device, torch.bfloat16) == expected


def test_a_dtype_that_is_not_served() -> None:
    with pytest.raises(InvalidArgumentError, match="dtype: 'int8' is not served; use auto, float32"):
        resolve_dtype("int8", CPU, torch.bfloat16)
