"""Writes a random model, and random adapters of it, as Hugging Face and PEFT would save them.

    python -m bench.random_checkpoint FOLDER [--tiny] [--layers N] [--adapters N --rank R]

Llama-3-8B shapes by default, in bfloat16, with a tokenizer whose made-up tokens cover the vocabulary. What is
in FOLDER already is kept. Many adapters share a few files of weights through hard links, and differ in their
alpha: for a server they are different ones, on the disk they take little. Prints the paths as JSON.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from bench.random_model import LLAMA_3_8B, TINY, RandomWeights
from deltaplane_server.execution.device import resolve_device
from deltaplane_server.models.config import DecoderConfig

DTYPE = torch.bfloat16
SHARD_BYTES = 1 << 30
WRITERS = 8
WEIGHT_FILES = 8
"""Files of weights that the adapters of one rank share: more than a processor's cache holds of them."""
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    device = resolve_device(args.device)
    config = TINY if args.tiny else LLAMA_3_8B
    if args.layers:
        config = replace(config, num_layers=args.layers, windows=(None,) * args.layers)
    model = args.folder / f"{'tiny' if args.tiny else 'llama-3-8b'}-{config.num_layers}-layers"
    begin = time.perf_counter()
    write_model(model, config, device)
    adapters = write_adapters(model / "adapters", config, args.adapters, args.rank, device)
    print(f"random checkpoint ready after {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    json.dump(
        {"model": str(model), "adapters": {name: str(path) for name, path in adapters.items()}}, sys.stdout
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, help="default: all of the model's")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="auto", help="where numbers are drawn")
    return parser.parse_args(argv)


def write_model(folder: Path, config: DecoderConfig, device: torch.device) -> None:
    """Writes shards, their index, a tokenizer and, last of all, config.json; nothing where that is there."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = made_up_tokenizer(config.vocab_size)
    tokenizer.save_pretrained(folder)
    _write_shards(folder, config, device)
    special: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GenerationConfig(**special).save_pretrained(folder)  # type: ignore[no-untyped-call]
    hf = LlamaConfig(
        architectures=[config.architecture],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_model_len,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=config.tie_word_embeddings,
        dtype=DTYPE,
        **special,
    )
    hf.save_pretrained(folder)


def write_adapters(
    folder: Path,
    config: DecoderConfig,
    number: int,
    rank: int,
    device: torch.device,
    *,
    use_dora: bool = False,
) -> dict[str, Path]:
    """Adapters of one rank on all linears, and their folders by name; those that are there are kept."""
    kind = f"dora-{rank}" if use_dora else f"rank-{rank}"
    files = [folder / f"{kind}-weights-{i}.safetensors" for i in range(min(number, WEIGHT_FILES))]
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not file.exists()]
    _write_all({file: partial(_adapter_tensors, config, rank, device, use_dora) for file in missing})
    adapters = {f"{kind}-{i:04}": folder / f"{kind}-{i:04}" for i in range(number)}
    for i, path in enumerate(adapters.values()):
        if not (path / "adapter_config.json").exists():
            alpha = rank * (1 + i / 10_000)
            _write_adapter(path, files[i % len(files)], config, rank, alpha, use_dora)
    return adapters


def made_up_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the 256 bytes, made-up words of two letters and more, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = list(islice(_words(), vocab_size - len(alphabet) - 2))
    vocabulary = {token: i for i, token in enumerate(alphabet + words)}
    bpe = models.BPE(vocab=vocabulary, merges=[(word[:-1], word[-1]) for word in words])
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def _words() -> Iterator[str]:
    """Words over the letters and the space, in byte-level BPE's spelling; the short ones first."""
    letters = "Ġabcdefghijklmnopqrstuvwxyz"
    return ("".join(word) for length in count(2) for word in product(letters, repeat=length))


def _write_shards(folder: Path, config: DecoderConfig, device: torch.device) -> None:
    shapes = config.tensor_shapes()
    shards = _shards(shapes)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weights = RandomWeights(config, DTYPE)
    _write_all(
        {
            folder / file: partial(_model_tensors, weights, shard, device)
            for file, shard in zip(names, shards, strict=True)
        }
    )
    index = {
        "metadata": {"total_size": sum(map(_nbytes, shapes.values()))},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """The names, cut where a shard is full."""
    shards: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        if not shards or _nbytes(shape) > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= _nbytes(shape)
    return shards


def _nbytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE.itemsize


def _model_tensors(weights: RandomWeights, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    return {name: weights.read_rows(name, dtype=DTYPE, device=device).cpu() for name in names}


def _adapter_tensors(
    config: DecoderConfig, rank: int, device: torch.device, use_dora: bool
) -> dict[str, Tensor]:
    """A and B of all linears, and the magnitudes of DoRA, under PEFT's names."""
    std = 0.1 / math.sqrt(config.hidden_size)
    tensors = {}
    for layer in range(config.num_layers):
        for linear in config.adapter_layout().linears:
            for part in linear.slices:
                shapes = {"A": (rank, linear.in_features), "B": (part.out_features, rank)}
                name = f"base_model.model.model.layers.{layer}.{part.module}"
                for side, shape in shapes.items():
                    values = torch.empty(shape, dtype=DTYPE, device=device).normal_(0.0, std)
                    tensors[f"{name}.lora_{side}.weight"] = values.cpu()
                if use_dora:
                    tensors[f"{name}.lora_magnitude_vector"] = torch.ones(part.out_features)
    return tensors


def _write_adapter(
    folder: Path, weights: Path, config: DecoderConfig, rank: int, alpha: float, use_dora: bool
) -> None:
    folder.mkdir(exist_ok=True)
    linked = folder / "adapter_model.safetensors"
    linked.unlink(missing_ok=True)
    os.link(weights, linked)
    modules = [part.module for linear in config.adapter_layout().linears for part in linear.slices]
    peft = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": alpha,
        "use_dora": use_dora,
        "target_modules": [module.rpartition(".")[2] for module in modules],
    }
    (folder / "adapter_config.json").write_text(json.dumps(peft, indent=2))


def _write_all(files: Mapping[Path, Callable[[], dict[str, Tensor]]]) -> None:
    """Draws and writes the tensors of each, several files at a time."""
    with ThreadPoolExecutor(WRITERS) as threads:
        for writing in [threads.submit(_write, path, draw) for path, draw in files.items()]:
            writing.result()


def _write(path: Path, draw: Callable[[], dict[str, Tensor]]) -> None:
    """Draws tensors and writes a file of them, which is either whole or not there."""
    part = path.with_suffix(".part")
    save_file(draw(), part)
    part.replace(path)


if __name__ == "__main__":
    main()
