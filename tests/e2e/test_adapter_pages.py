"""Adapters that take more pages than their rank alone: as many are on the device as GetCapacity says."""

from pathlib import Path

import pytest

from deltaplane import Client
from deltaplane.v1.adapters_pb2 import ADAPTER_STATE_RESIDENT
from hub_cache import cached_snapshot
from peft_factory import make_adapter, make_tiny_model
from serving import served

RANK = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """Three of the highest rank with DoRA, in a cache of the hub, whose files are links."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        f"a{seed}": make_adapter(model, folder / str(seed), use_dora=True, seed=seed) for seed in range(3)
    }
    return {name: cached_snapshot(folder / "hub", files, name) for name, files in made.items()}


@pytest.mark.parametrize(("flags", "num_fit"), [((), 1), (("--adapter-pages", "6"), 3)])
def test_slots_for_dora_are_as_many_as_have_pages(
    tmp_path: Path, model: Path, adapters: dict[str, Path], flags: tuple[str, ...], num_fit: int
) -> None:
    limits = ("--max-loras", "3", "--max-lora-rank", str(RANK))
    with (
        served(model, tmp_path, *limits, *flags, adapters=adapters) as server,
        Client(server.address, server.admin_address) as client,
    ):
        capacity = client.adapters.capacity([RANK, RANK + 1])
        alone, with_dora = capacity.by_rank
        assert (capacity.slots, capacity.rank_pages) == (3, 6 if flags else 3)
        assert (alone.pages, alone.fit_available) == (1, 3)
        assert (with_dora.pages, with_dora.fit_available) == (2, num_fit)
        found = list(client.adapters.list())
        assert {adapter.name: adapter.source for adapter in found} == {n: str(p) for n, p in adapters.items()}
        assert [adapter.state for adapter in found].count(ADAPTER_STATE_RESIDENT) == num_fit
        answers = {client.generate_text("What is the sea like?", adapter=n, max_tokens=16) for n in adapters}
        assert len(answers) == 3
