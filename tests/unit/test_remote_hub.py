"""Fetching adapters from a Hugging Face hub: revisions, tokens, the store of its files, and refusals."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.errors import (
    DeltaplaneError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from deltaplane_controlplane.ports import NO_PROGRESS, FetchedSource
from deltaplane_server.adapters.files import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.remote.addresses import AllowedSources, parse_prefix
from deltaplane_server.adapters.remote.fetcher import FetchLimits, RemoteFetcher
from deltaplane_server.adapters.remote.host import FileBounds
from deltaplane_server.adapters.remote.retries import Retries
from fake_hub import COMMIT, NEXT_COMMIT, TOKEN, FakeHub, fake_hub
from http_host import Fault, cut, redirect, status

ADAPTER = {CONFIG_FILE: b"{}", WEIGHTS_FILE: bytes(range(256)) * 1024, "README.md": b"# read me"}
NEXT = {CONFIG_FILE: b'{"r": 1}', WEIGHTS_FILE: b"other weights"}
BOUNDS = FileBounds(1000, 1 << 20)
API = "/api/models/org/name/revision/main"
WEIGHTS_PATH = f"/org/name/resolve/{COMMIT}/{WEIGHTS_FILE}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as hub:
        hub.publish("org/name", ADAPTER)
        yield hub


@pytest.fixture
def fetcher(tmp_path: Path) -> Iterator[RemoteFetcher]:
    store = AdapterStore(tmp_path / "store")
    limits = FetchLimits(retries=Retries(max_tries=3, backoff_s=0.0))
    fetcher = RemoteFetcher(store, AllowedSources([parse_prefix("hf://")]), BOUNDS, limits)
    yield fetcher
    fetcher.close()
    store.close()


def fetch(fetcher: RemoteFetcher, source: str = "hf://org/name") -> FetchedSource:
    return fetcher.fetch(source, NO_PROGRESS)


def refusal(
    fetcher: RemoteFetcher,
    source: str = "hf://org/name",
    kind: type[DeltaplaneError] = InvalidArgumentError,
    reason: str = "SOURCE_NOT_READABLE",
) -> str:
    with pytest.raises(kind) as caught:
        fetch(fetcher, source)
    assert caught.value.reason == reason
    assert TOKEN not in caught.value.message
    return caught.value.message


def test_the_two_files_of_an_adapter_come_from_the_hubs_store(hub: FakeHub, fetcher: RemoteFetcher) -> None:
    fetched = fetch(fetcher)
    assert fetched.source == f"hf://org/name@{COMMIT}"
    found = {file.name: file.read_bytes() for file in fetched.folder.iterdir()}
    assert found == {name: ADAPTER[name] for name in (CONFIG_FILE, WEIGHTS_FILE)}
    assert [path.rpartition("/")[2] for path in hub.store.paths()] == [
        f"{CONFIG_FILE}?signature=s",
        f"{WEIGHTS_FILE}?signature=s",
    ]


@pytest.mark.parametrize("revision", ["main", "v1", "refs/pr/1"])
def test_a_revision_becomes_its_commit_which_brings_the_same_files_for_ever(
    hub: FakeHub, fetcher: RemoteFetcher, revision: str
) -> None:
    hub.publish("org/name", ADAPTER, revision=revision)
    source = fetch(fetcher, f"hf://org/name@{revision}").source
    hub.publish("org/name", NEXT, NEXT_COMMIT, revision)
    assert source == f"hf://org/name@{COMMIT}"
    again = fetch(fetcher, source)
    assert again.source == source
    assert (again.folder / WEIGHTS_FILE).read_bytes() == ADAPTER[WEIGHTS_FILE]
    moved = fetch(fetcher, f"hf://org/name@{revision}")
    assert moved.source == f"hf://org/name@{NEXT_COMMIT}"
    assert (moved.folder / WEIGHTS_FILE).read_bytes() == NEXT[WEIGHTS_FILE]


def test_a_private_repository_is_asked_for_with_the_token_which_the_store_does_not_see(
    hub: FakeHub, fetcher: RemoteFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("org/name", ADAPTER, private=True)
    assert "the hub has no such repository, or shows it only to others" in refusal(fetcher)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch(fetcher)
    assert all("authorization" not in asked.headers for asked in hub.store.asked)


def test_a_file_goes_on_with_a_new_signature(hub: FakeHub, fetcher: RemoteFetcher) -> None:
    hub.store.fail(f"/blobs{WEIGHTS_PATH}", cut(1000), status(403), cut(1000))
    assert "is refused with 403" in refusal(fetcher)
    fetched = fetch(fetcher)
    assert (fetched.folder / WEIGHTS_FILE).read_bytes() == ADAPTER[WEIGHTS_FILE]
    assert hub.host.paths().count(WEIGHTS_PATH) == 4
    assert hub.store.asked[-1].offset == 1000


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("hf://org/other", "hf://org/other@main: the hub has no such repository"),
        ("hf://org/name@v9", "hf://org/name@v9: the repository has no such revision"),
    ],
)
def test_what_the_hub_does_not_have_is_told(
    hub: FakeHub, fetcher: RemoteFetcher, source: str, told: str
) -> None:
    assert told in refusal(fetcher, source)


def test_a_repository_without_the_files_of_an_adapter_is_told(hub: FakeHub, fetcher: RemoteFetcher) -> None:
    hub.publish("org/name", {CONFIG_FILE: b"{}"})
    assert refusal(fetcher) == f"source: hf://org/name has no {WEIGHTS_FILE}"
    hub.publish("org/name", {CONFIG_FILE: b"{}", PICKLE_FILE: b""})
    assert "adapter_model.bin is a pickle, which may run code: convert it" in refusal(fetcher)
    hub.publish("org/name", {WEIGHTS_FILE: b"weights"}, NEXT_COMMIT)
    assert f"{CONFIG_FILE} of hf://org/name@{NEXT_COMMIT} does not exist" in refusal(fetcher)


def test_a_gated_repository_is_told(hub: FakeHub, fetcher: RemoteFetcher) -> None:
    """Its files are listed for everybody, and sent to few."""
    hub.host.check = lambda asked: (
        status(403, X_Error_Code="GatedRepo") if "/resolve/" in asked.path else None
    )
    assert "is refused with 403 (GatedRepo)" in refusal(fetcher)


@pytest.mark.parametrize(
    "fault", [status(500), status(503), status(429), cut(0), status(200, b"<html>")], ids=range(5)
)
def test_a_hub_in_trouble_is_asked_again_and_then_unavailable(
    hub: FakeHub, fetcher: RemoteFetcher, fault: Fault
) -> None:
    hub.host.fail(API, fault, fault)
    assert fetch(fetcher).source == f"hf://org/name@{COMMIT}"
    hub.host.fail(API, fault, fault, fault)
    refusal(fetcher, kind=UnavailableError, reason="SOURCE_UNAVAILABLE")


def test_a_hub_that_is_not_there_is_unavailable(
    hub: FakeHub, fetcher: RemoteFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    told = refusal(fetcher, kind=UnavailableError, reason="SOURCE_UNAVAILABLE")
    assert told == "hf://org/name cannot be fetched now: there is no connection to it"


def test_a_hub_that_is_switched_off_is_told(
    hub: FakeHub, fetcher: RemoteFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(fetcher, kind=FailedPreconditionError)
    assert hub.host.paths() == []


@pytest.mark.parametrize("location", ["http://169.254.169.254/", "file:///etc/passwd", "ftp://x/"])
def test_the_hub_leads_to_https_alone(hub: FakeHub, fetcher: RemoteFetcher, location: str) -> None:
    hub.host.check = lambda asked: redirect(location) if "/resolve/" in asked.path else None
    refusal(fetcher, reason="SOURCE_NOT_ALLOWED")


def test_an_answer_that_names_no_commit_is_told(hub: FakeHub, fetcher: RemoteFetcher) -> None:
    hub.publish("org/name", ADAPTER, commit="../../main")
    assert "names no commit" in refusal(fetcher)
