"""What `make gpu-test` says where it cannot run."""

import pytest
import torch

from deploy import check_gpu


@pytest.fixture(autouse=True)
def with_all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "NEEDED", {"pytest": "pytest"})


def test_a_machine_without_a_gpu_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpu.main() == 1
    assert "sees no CUDA device; run this on a machine with an NVIDIA GPU" in capsys.readouterr().err


def test_a_machine_with_a_gpu_may_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_gpu.main() == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["nowhere_at_all", "nowhere.at_all"])
def test_packages_that_are_missing_are_named(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_gpu, "NEEDED", {"pytest": "pytest", module: "nowhere-at-all"})
    assert check_gpu.main() == 1
    assert capsys.readouterr().err.endswith("-m pip install nowhere-at-all\n")
