"""The benchmarks of the whole server, with a tiny model on the CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from bench import first_token, many_adapters, random_checkpoint, report, serve, through_grpc
from bench.random_model import TINY
from bench.server_process import server_process
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.models.config import load_decoder_config
from deltaplane_server.models.weights import Checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def arguments(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return ["--tiny", "--device", "cpu", "--checkpoints", str(checkpoints)]


def test_the_rate_through_grpc_is_compared_with_the_engines(arguments: list[str], tmp_path: Path) -> None:
    results = through_grpc.main([*arguments, "--clients", "1"])
    assert list(results) == ["2,0", "4,2"]
    written = json.loads((tmp_path / "through-grpc-tiny.json").read_text())["results"]
    for key, row in results.items():
        assert row.engine > 0
        assert row.ratio == pytest.approx(row.middle.tokens_per_s / row.engine)
        assert row.middle.requests == int(key.split(",")[0])
        assert written[key]["ratio"] == row.ratio


def test_more_and_more_adapters(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = many_adapters.main([*arguments, "--max-loras", "4", "--clients", "1", "--uniform"])
    assert list(stages) == [2, 6]
    assert stages[2].loads == 0
    assert stages[6].loads > 0, "six do not fit into four slots"
    assert all(stage.load.requests > 0 and not stage.load.errors for stage in stages.values())
    told = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:6]]
    rates = {number: f"{stage.load.tokens_per_s:.0f}" for number, stage in stages.items()}
    assert told == [[f"{n}:", what] for n in (2, 6) for what in ("registered", "loaded", rates[n])]
    written = json.loads((tmp_path / "many-adapters-tiny.json").read_text())
    assert written["results"]["2"]["of_fewest"] == 1
    assert written["workload"]["choice"] == "uniform"


def test_first_tokens_of_each_case(arguments: list[str], tmp_path: Path) -> None:
    results = first_token.main(arguments)
    assert list(results.cases) == ["base", "resident", "host", "cold"]
    assert all(case.ttft.p50 > 0 for case in results.cases.values())
    host, cold = results.cases["host"].load, results.cases["cold"].load
    assert host is not None
    assert cold is not None
    assert host["read_ms"] == host["pack_ms"] == 0 < host["copy_ms"]
    assert all(cold[stage] > 0 for stage in ("queue_ms", "read_ms", "pack_ms", "copy_ms"))
    assert results.start_s > 0
    assert json.loads((tmp_path / "first-token-tiny.json").read_text())["workload"]["prompt_tokens"] == 16


def test_a_load_on_a_server_that_it_starts_or_that_runs(arguments: list[str], tmp_path: Path) -> None:
    options = ["--clients", "1", "--adapters", "2", "--streams", "2", "--seconds", "0.5"]
    result = serve.main([*arguments, *options, "--", "--max-waiting", "8"])
    assert result.requests > 0
    assert not result.errors
    assert (
        json.loads((tmp_path / "serve-tiny.json").read_text())["workload"]["adapters"] == "2 adapters, zipf"
    )


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match=r"did not start\n.*there is no such folder"),
        server_process(tmp_path / "nothing"),
    ):
        pass


def test_a_random_checkpoint_is_the_model_that_was_asked_for(tmp_path: Path) -> None:
    wanted = replace(TINY, num_layers=3, windows=(None,) * 3)
    random_checkpoint.write_model(tmp_path, wanted, CPU)
    found = load_decoder_config(tmp_path)
    assert replace(found, eos_token_ids=frozenset(), rope=wanted.rope) == wanted
    assert found.rope.inv_freq == pytest.approx(wanted.rope.inv_freq)
    weights = Checkpoint.open(tmp_path)
    weights.check(wanted.tensor_shapes())
    assert weights.dtype is torch.bfloat16


def test_the_shards_of_a_random_checkpoint_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 100_000)
    random_checkpoint.write_model(tmp_path, TINY, CPU)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 110_000 for shard in shards)
    Checkpoint.open(tmp_path).check(TINY.tensor_shapes())


def test_each_id_of_the_made_up_vocabulary_is_text(tmp_path: Path) -> None:
    random_checkpoint.made_up_tokenizer(2000).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 2000
    assert len({tokenizer.decode([token]) for token in range(256, 1998)}) == 1998 - 256
    assert tokenizer.decode([1998, 1999], skip_special_tokens=True) == ""
    text = "a ship left the harbour\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)


def test_adapters_that_share_files_are_different_ones(tmp_path: Path) -> None:
    number = random_checkpoint.WEIGHT_FILES + 2
    adapters = random_checkpoint.write_adapters(tmp_path, TINY, number, 4, CPU)
    again = random_checkpoint.write_adapters(tmp_path, TINY, number, 4, CPU)
    assert adapters == again
    loader = PeftLoader(TINY.adapter_layout(), max_lora_rank=4, dtype=torch.float32)
    manifests = [loader.inspect(path) for path in adapters.values()]
    assert len({manifest.digest for manifest in manifests}) == len(adapters) == number
    assert all(manifest.rank == 4 and len(manifest.target_modules) == 7 for manifest in manifests)
    files = {(path / "adapter_model.safetensors").stat().st_ino for path in adapters.values()}
    assert len(files) == random_checkpoint.WEIGHT_FILES
    first = loader.pack(manifests[0]).pages
    assert not loader.pack(manifests[-1]).pages.equal(first)
