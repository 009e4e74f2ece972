"""Adapters that a real server fetches answer as those whose folders they are from, whatever happens to it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import eventually
from deltaplane import Client, errors
from fake_hub import COMMIT, TOKEN, FakeHub, fake_hub
from http_host import stall, status
from peft_factory import make_adapter, make_tiny_model
from serving import Served, served

PROMPT = list(b"A prompt")
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as hub:
        yield hub


def tokens(server: Served, adapter: str) -> list[int]:
    with Client(server.address, server.admin_address) as client:
        done = client.complete(PROMPT, adapter=adapter, max_tokens=12, temperature=0)
        return list(done.outputs[0].token_ids)


def test_they_answer_as_their_folders_do_after_a_kill_and_without_their_sources(
    tmp_path: Path, hub: FakeHub
) -> None:
    model = make_tiny_model(tmp_path, "qwen3")
    folder = make_adapter(model, tmp_path / "adapter", rank=16, seed=1)
    files = {name: (folder / name).read_bytes() for name in FILES}
    hub.publish("org/name", files, private=True)
    state = ["--state", str(tmp_path / "catalogue.sqlite3")]
    store = tmp_path / "catalogue.sqlite3.uploads"
    flags = [*state, "--lora-modules", "fetched=hf://org/name", "--adapter-sources", "hf://org/"]
    environment = os.environ | {"HF_ENDPOINT": hub.host.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}

    with served(model, tmp_path, *flags, env=environment) as server:
        with Client(server.address, server.admin_address) as client:
            assert client.adapters.get("fetched").source == f"hf://org/name@{COMMIT}"
            with pytest.raises(errors.InvalidArgumentError, match="not an allowed source"):
                client.adapters.register("other", "hf://other/name")
            expected = tokens(server, "fetched")
            hub.store.fail(f"/blobs/org/name/resolve/{COMMIT}/{FILES[1]}", stall(100))
            client.adapters.register("more", "hf://org/name", return_immediately=True)
            assert hub.store.stalled.wait(30)
        server.process.kill()
    assert len(list(store.glob(".fetch-*"))) == 1

    hub.host.check = lambda asked: status(403)
    with served(model, tmp_path, *state, adapters={"local": folder}) as server:
        assert tokens(server, "fetched") == tokens(server, "local") == expected != tokens(server, "")
        eventually(lambda: len(list(store.iterdir())) == 1, "the removal of what was not complete")
    log = server.log.read_text()
    assert "adapter.fetched" in log
    assert TOKEN not in log
    assert "signature=" not in log
