"""The benchmark of loads beside running streams, on a tiny model on the CPU."""

import json
from pathlib import Path

import pytest

from bench import adapter_loads, report
from bench.adapter_loads import RANK, Latency


@pytest.mark.parametrize(
    ("options", "result"), [([], "adapter-loads-tiny"), (["--dora"], "adapter-loads-dora-tiny")]
)
def test_measures_and_reports_streams_and_loads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    result: str,
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    figures = adapter_loads.main(["--tiny", "--device", "cpu", *options])
    assert 0 < figures.alone.p50 <= figures.alone.p99 <= figures.alone.highest
    assert 0 < figures.loading.p50 <= figures.loading.p99 <= figures.loading.highest
    assert figures.loads_per_second > 0
    assert min(figures.load.read, figures.load.pack, figures.load.copy) > 0
    assert figures.p99_ratio == figures.loading.p99 / figures.alone.p99
    written = json.loads((tmp_path / f"{result}.json").read_text())
    assert written["results"]["loading"]["p99"] == figures.loading.p99
    assert written["workload"]["rank"] == RANK
    assert "loads a second" in capsys.readouterr().out


def test_without_a_gpu_only_the_tiny_model_runs() -> None:
    with pytest.raises(SystemExit, match="run it on a GPU machine, or with --tiny"):
        adapter_loads.main(["--device", "cpu"])


def test_an_error_of_a_load_is_the_benchmarks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(adapter_loads, "_num_pages", lambda work: 1)
    with pytest.raises(ValueError, match="must be different ones of 0 to 0"):
        adapter_loads.main(["--tiny", "--device", "cpu"])


@pytest.mark.parametrize(
    ("count", "p50", "p99", "highest"),
    [(1, 1, 1, 1), (2, 1, 2, 2), (100, 50, 99, 100), (1000, 500, 990, 1000)],
)
def test_percentiles_are_values_that_were_seen(count: int, p50: int, p99: int, highest: int) -> None:
    seconds = [i / 1000 for i in range(count, 0, -1)]
    latency = Latency.of(seconds)
    assert (latency.p50, latency.p99, latency.highest) == pytest.approx((p50, p99, highest))
