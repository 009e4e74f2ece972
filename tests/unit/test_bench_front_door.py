"""The benchmark of the way through gRPC, with few streams and for a moment."""

import json
from pathlib import Path

import pytest

from bench import front_door, report


def test_measures_what_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(front_door, "_WARMUP_S", 0.3)
    results = front_door.main(["--rows", "3,20", "--seconds", "0.6", "--clients", "1"])
    figures = results["3, 20"]
    assert 0 < figures.kept < 1.5
    assert figures.load.messages_per_s > 0
    assert not figures.load.errors
    assert figures.loop_us > 0
    assert figures.engine_us > 0
    assert json.loads((tmp_path / "front-door.json").read_text())["results"]["3, 20"]["kept"] == figures.kept


def test_streams_that_would_end_too_early_are_refused() -> None:
    with pytest.raises(SystemExit, match="measure for fewer seconds"):
        front_door.main(["--rows", "1,0.01", "--seconds", "600"])
