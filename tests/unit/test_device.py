"""Where the model runs and in which numbers."""

import os

import pytest
import torch

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.execution.device import resolve_device, resolve_dtype, resolve_num_threads

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


@pytest.mark.parametrize(
    ("cores", "omp", "expected"), [(1, 1, 1), (2, 2, 1), (8, 8, 7), (8, 4, 4), (8, 1, 1)]
)
def test_one_core_is_left_for_the_event_loop(
    cores: int, omp: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: omp)
    assert resolve_num_threads(None) == expected
    assert resolve_num_threads(3) == 3
