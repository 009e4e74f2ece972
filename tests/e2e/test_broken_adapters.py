"""Files that are no good are refused at register, at update and at load, with the reason; whoever is served
goes on, from the same weights in the same place."""

import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltaplane import AdapterClient, Client
from deltaplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane.v1 import adapters_pb2
from e2e_reference import Reference
from peft_factory import make_adapter, make_tiny_model
from serving import Served, served

PROMPT = list(b"What is the sea like?")
WEIGHTS = "adapter_model.safetensors"

Break = Callable[[Path], None]


def _bytes(change: Callable[[bytes], bytes]) -> Break:
    def apply(folder: Path) -> None:
        file = folder / WEIGHTS
        file.write_bytes(change(file.read_bytes()))

    return apply


def _first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        name = min(tensors)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, folder / WEIGHTS)

    return apply


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


BROKEN: dict[str, tuple[Break, str]] = {
    "truncated": (_bytes(lambda data: data[:-100]), WEIGHTS),
    "a flipped byte of the header": (_bytes(lambda data: data[:8] + b"[" + data[9:]), WEIGHTS),
    "a header of 2 GB": (_bytes(lambda data: struct.pack("<Q", 2 << 30) + data[8:]), WEIGHTS),
    "an empty file": (_bytes(lambda _: b""), WEIGHTS),
    "a wrong shape": (
        _first_tensor(lambda tensor: tensor[..., :-1]),
        r"has shape \(8, 127\); .* takes \(8, 128\)",
    ),
    "NaN": (_first_tensor(lambda tensor: tensor * torch.nan), "NaN or infinite"),
    "Inf": (_first_tensor(lambda tensor: tensor.fill_(torch.inf)), "NaN or infinite"),
    "a pickle": (_pickle, "safetensors"),
}
"""What is broken, and what the answer speaks of."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_tiny_model(folder, "llama")


@pytest.fixture(scope="module")
def trained(folder: Path, model: Path) -> dict[str, Path]:
    return {
        name: make_adapter(model, folder / name, rank=8, seed=seed)
        for seed, name in enumerate(("one", "two", "three"))
    }


@pytest.fixture(scope="module")
def greedy(model: Path, trained: dict[str, Path]) -> dict[str, list[int]]:
    reference = Reference(model, trained)
    return {name: list(reference.greedy(PROMPT, name, 8).tokens) for name in ("one", "two")}


@pytest.fixture(scope="module")
def server(folder: Path, model: Path, trained: dict[str, Path]) -> Iterator[Served]:
    """Both of its slots are taken, by adapters that nobody uses."""
    flags = ["--max-loras", "2", "--adapter-roots", str(folder)]
    adapters = {name: trained[name] for name in ("one", "two")}
    with served(model, folder, *flags, adapters=adapters) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Client]:
    with Client(server.address, server.admin_address) as client:
        yield client


def placed(adapters: AdapterClient) -> list[tuple[str, int, int]]:
    return [(slot.adapter, slot.version, slot.state) for slot in adapters.slots()]


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files(
    client: Client,
    folder: Path,
    trained: dict[str, Path],
    greedy: dict[str, list[int]],
    kind: str,
) -> None:
    break_files, told = BROKEN[kind]
    before = placed(client.adapters)
    assert {slot[2] for slot in before} == {adapters_pb2.ADAPTER_STATE_RESIDENT}

    bad = shutil.copytree(trained["three"], folder / "bad" / kind)
    client.adapters.register("late", str(bad))
    break_files(bad)
    with pytest.raises(InvalidArgumentError, match=told):
        client.adapters.register("bad", str(bad))
    with pytest.raises(InvalidArgumentError, match=told):
        client.adapters.update("one", source=str(bad))
    with pytest.raises(FailedPreconditionError):
        client.complete(PROMPT, adapter="late", max_tokens=8)
    late = client.adapters.get("late")
    assert late.state == adapters_pb2.ADAPTER_STATE_FAILED
    assert late.state_reason

    assert placed(client.adapters) == before
    for name, tokens in greedy.items():
        done = client.complete(PROMPT, adapter=name, max_tokens=8, temperature=0.0)
        assert list(done.outputs[0].token_ids) == tokens
        assert done.usage is not None
        assert done.usage.adapter_hit
        assert client.adapters.get(name).evictions == 0
    client.adapters.delete("late")
