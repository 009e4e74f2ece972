"""An adapter that was uploaded to a real server answers as the one whose folder it came from."""

from pathlib import Path

from deltaplane import Client
from peft_factory import make_adapter, make_tiny_model
from serving import Served, served

PROMPT = list(b"A prompt")


def tokens(server: Served, adapter: str) -> list[int]:
    with Client(server.address, server.admin_address) as client:
        done = client.complete(PROMPT, adapter=adapter, max_tokens=12, temperature=0)
        return list(done.outputs[0].token_ids)


def test_it_answers_as_its_folder_does_and_after_a_restart(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "qwen3")
    folder = make_adapter(model, tmp_path / "adapter", rank=16, seed=1)
    state = ["--state", str(tmp_path / "catalogue.sqlite3")]
    with served(model, tmp_path, *state, adapters={"local": folder}) as server:
        with Client(server.address, server.admin_address) as client:
            source = Path(client.adapters.upload("uploaded", folder).source)
        assert source.parent == tmp_path / "catalogue.sqlite3.uploads"
        expected = tokens(server, "local")
        assert tokens(server, "uploaded") == expected != tokens(server, "")
    with served(model, tmp_path, *state) as server:
        assert tokens(server, "uploaded") == expected
        with Client(server.address, server.admin_address) as client:
            client.adapters.delete("uploaded")
    assert not source.exists()
