"""Reading checkpoints: what is there, what is missing, and what is broken."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.models.config import load_decoder_config
from deltaplane_server.models.decoder import HEAD, Decoder, decoder_bytes
from deltaplane_server.models.upload import Upload
from deltaplane_server.models.weights import Checkpoint
from peft_factory import make_tiny_model

CPU = torch.device("cpu")
SHAPES = {"a": (2, 3), "b": (4, 3)}


def save(folder: Path, *, dtype: torch.dtype = torch.float32, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    named = tensors or {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def save_shards(folder: Path, index: object = None) -> Path:
    save_file({"a": torch.ones(2, 3)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(4, 3), "other": torch.zeros(1)}, folder / "two.safetensors")
    places = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    return folder


def refusal(folder: Path, expected: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        Checkpoint.open(folder).check(expected or SHAPES)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_rows_come_below_each_other_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    a, b = torch.randn(2, 3).bfloat16(), torch.randn(4, 3).bfloat16()
    checkpoint = Checkpoint.open(save(tmp_path, a=a, b=b))
    checkpoint.check(SHAPES)

    rows = checkpoint.read_rows("b", "a", dtype=torch.float32, device=CPU)

    assert rows.dtype == torch.float32
    assert torch.equal(rows, torch.cat((b, a)).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, dtype=dtype))
    assert checkpoint.dtype == checkpoint.dtype_of("a") == dtype
    assert torch.equal(checkpoint.read("a"), load_file(tmp_path / "model.safetensors")["a"])


def test_the_dtype_is_that_of_most_weights(tmp_path: Path) -> None:
    save(tmp_path, a=torch.zeros(2, 3), b=torch.zeros(400, 3).bfloat16())
    assert Checkpoint.open(tmp_path).dtype == torch.bfloat16


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_shards(tmp_path))
    checkpoint.check(SHAPES)
    rows = checkpoint.read_rows("a", "b", dtype=torch.float32, device=CPU)
    assert torch.equal(rows, torch.cat((torch.ones(2, 3), torch.zeros(4, 3))))


def test_places_are_those_of_the_tensors_in_their_files(tmp_path: Path) -> None:
    """What an upload to a GPU goes by, for each dtype and over two shards."""
    tensors = {
        f"t{size}-{dtype}": torch.randn(size).to(dtype)
        for size in (1, 3, 1000)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    names = list(tensors)
    shards = {"one.safetensors": names[:4], "two.safetensors": names[4:]}
    for file, kept in shards.items():
        save_file({name: tensors[name] for name in kept}, tmp_path / file, metadata={"format": "pt"})
    places = {name: file for file, kept in shards.items() for name in kept}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    checkpoint = Checkpoint.open(tmp_path)
    upload = Upload(CPU, num_readers=2, buffer_bytes=512)
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for name, target in targets.items():
        upload.fill(target, checkpoint.tensors[name])
    upload.finish()

    assert checkpoint.tensors.keys() == tensors.keys()
    assert all(torch.equal(targets[name], tensors[name]) for name in names)


def test_missing_unexpected_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    save(tmp_path, a=torch.zeros(2, 4), c=torch.zeros(1))
    message = refusal(tmp_path)
    assert "missing: b" in message
    assert "unexpected: c" in message
    assert "a [2, 4], the config says [2, 3]" in message


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    message = refusal(save(tmp_path), {f"t{i}": (1,) for i in range(20)})
    assert "t0, t1, t2, t3, t4, t5, t6, t7 and 12 more" in message


def test_frequencies_that_old_checkpoints_carry_are_passed_over(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    Checkpoint.open(tmp_path).check(SHAPES)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    message = refusal(tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("index", [[], {}, {"weight_map": 3}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none(tmp_path: Path, index: object) -> None:
    assert "not an index" in refusal(save_shards(tmp_path, index))


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    assert "two.safetensors cannot be read" in refusal(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    save_shards(tmp_path, {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})
    assert "missing: b" in refusal(tmp_path)


def test_a_file_that_is_cut_off_after_its_header_was_read(tmp_path: Path) -> None:
    file = save(tmp_path) / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors cannot be read"):
        checkpoint.read("a")


def test_a_file_that_is_gone_after_its_header_was_read(tmp_path: Path) -> None:
    file = save(tmp_path) / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    file.unlink()
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors cannot be read: No such file"):
        checkpoint.read_rows("a", dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kept", [0, 4, 40, -8])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    file = save(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors cannot be read" in refusal(tmp_path)


def test_a_header_length_beyond_reason(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2 << 30).to_bytes(8, "little") + b"{}")
    assert "model.safetensors cannot be read" in refusal(tmp_path)


def test_quantized_tensors_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, a=torch.zeros(2, 3, dtype=torch.int8), b=torch.zeros(4, 3))
    message = refusal(tmp_path)
    assert "a in" in message
    assert "I8" in message


def test_files_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert "hold no tensor" in refusal(tmp_path)


def test_a_head_beside_tied_embeddings_is_used_as_in_transformers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    hidden = torch.randn(1, 64)

    def logits() -> torch.Tensor:
        config, checkpoint = load_decoder_config(folder), Checkpoint.open(folder)
        return Decoder(config, checkpoint, torch.float32, CPU).logits(hidden)

    tied = logits()
    save_file({**tensors, HEAD: -tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    torch.testing.assert_close(logits(), -tied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_are_the_head_in_the_dtype_that_is_served(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    decoder = Decoder(load_decoder_config(folder), Checkpoint.open(folder), dtype, CPU)
    logits = decoder.logits(torch.ones(1, 64, dtype=dtype))
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    expected = norm @ table.T
    torch.testing.assert_close(logits[0], expected, rtol=0.05, atol=0.05)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors[HEAD]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"missing: lm_head\.weight"):
        Decoder(load_decoder_config(folder), Checkpoint.open(folder), torch.float32, CPU)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_bytes_of_a_decoder(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(tmp_path, family, tie_word_embeddings=True)
    config, checkpoint = load_decoder_config(folder), Checkpoint.open(folder)
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    table = config.vocab_size * config.hidden_size

    assert decoder_bytes(config, checkpoint, torch.float32, CPU) == (parameters + table) * 4
    assert decoder_bytes(config, checkpoint, torch.bfloat16, CPU) == parameters * 2 + table * 4
    assert decoder_bytes(config, checkpoint, torch.float32, torch.device("cuda")) == parameters * 4
