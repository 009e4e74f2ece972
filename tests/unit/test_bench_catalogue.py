"""The benchmark of the catalogue, with a few adapters of a tiny model on the CPU."""

import json
from pathlib import Path

import pytest

from bench import catalogue, report
from bench.catalogue import Times


def test_registers_lists_scrapes_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    figures = catalogue.main(["--tiny", "--checkpoints", str(tmp_path / "checkpoints")])
    assert figures.registering.per_second > 0
    assert figures.registering.call.calls == 38, "two of forty warm the server up"
    assert list(figures.pages) == ["default", "largest", "name", "label", "state"]
    assert all(0 < times.p50 <= times.highest for times in (*figures.pages.values(), figures.scrape))
    assert 0 < figures.restart.restore_ms < 1e3 * figures.restart.ready_s
    written = json.loads((tmp_path / "catalogue-tiny.json").read_text())
    assert written["results"]["pages"]["label"] == {
        "p50": figures.pages["label"].p50,
        "highest": figures.pages["label"].highest,
        "calls": 1,
    }
    assert written["workload"]["adapters"] == 40
    assert "registrations a second" in capsys.readouterr().out


def test_times_are_of_calls_that_were_made() -> None:
    assert Times.of([0.003, 0.001, 0.002, 0.004]) == Times(2.0, 4.0, 4)
