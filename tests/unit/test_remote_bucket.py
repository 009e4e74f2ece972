"""Fetching adapters from S3: signed URLs, credentials of the environment, and what it refuses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane_controlplane.ports import NO_PROGRESS, FetchedSource
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.remote.addresses import AllowedSources, parse_prefix
from deltaplane_server.adapters.remote.bucket import check_installed
from deltaplane_server.adapters.remote.fetcher import RemoteFetcher
from deltaplane_server.adapters.remote.host import FileBounds
from http_host import cut, redirect
from s3_host import KEY_ID, SECRET, S3Host, s3_host

WEIGHTS = bytes(range(256)) * 1024


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Host]:
    with s3_host(monkeypatch) as s3:
        yield s3


@pytest.fixture
def fetcher(tmp_path: Path, s3: S3Host) -> Iterator[RemoteFetcher]:
    store = AdapterStore(tmp_path / "store")
    fetcher = RemoteFetcher(store, AllowedSources([parse_prefix("s3://models/")]), FileBounds(1000, 1 << 20))
    yield fetcher
    fetcher.close()
    store.close()


def fetch(fetcher: RemoteFetcher, source: str = "s3://models/team/a") -> FetchedSource:
    return fetcher.fetch(source, NO_PROGRESS)


def refusal(fetcher: RemoteFetcher) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        fetch(fetcher)
    message = caught.value.message
    assert not any(secret in message for secret in (KEY_ID, SECRET, "Signature="))
    return message


@pytest.mark.parametrize("prefix", ["team/a", "team a/b+c/ü=1"])
def test_an_adapter_comes_with_signed_requests(s3: S3Host, fetcher: RemoteFetcher, prefix: str) -> None:
    s3.put("models", f"{prefix}/{CONFIG_FILE}", b"{}")
    s3.put("models", f"{prefix}/{WEIGHTS_FILE}", WEIGHTS)
    fetched = fetch(fetcher, f"s3://models/{prefix}/")
    assert fetched.source == f"s3://models/{prefix}"
    assert (fetched.folder / CONFIG_FILE).read_bytes() == b"{}"
    assert (fetched.folder / WEIGHTS_FILE).read_bytes() == WEIGHTS


def test_an_object_goes_on_where_it_was_cut(s3: S3Host, fetcher: RemoteFetcher) -> None:
    s3.put("models", f"team/a/{CONFIG_FILE}", b"{}")
    s3.put("models", f"team/a/{WEIGHTS_FILE}", WEIGHTS)
    s3.host.fail(f"/models/team/a/{WEIGHTS_FILE}", cut(1000))
    assert (fetch(fetcher).folder / WEIGHTS_FILE).read_bytes() == WEIGHTS
    assert s3.host.asked[-1].offset == 1000


def test_what_is_not_there_is_told_in_the_words_of_s3(s3: S3Host, fetcher: RemoteFetcher) -> None:
    assert f"s3://models/team/a/{CONFIG_FILE} does not exist: the server answers 404 (NoSuchKey)" in refusal(
        fetcher
    )


def test_credentials_that_are_not_taken_are_told_and_not_shown(
    s3: S3Host, fetcher: RemoteFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert "is refused with 403 (SignatureDoesNotMatch)" in refusal(fetcher)


def test_a_bucket_leads_nowhere_else(s3: S3Host, fetcher: RemoteFetcher) -> None:
    s3.put("models", f"team/a/{CONFIG_FILE}", b"{}")
    s3.host.fail(f"/models/team/a/{CONFIG_FILE}", redirect(f"{s3.host.url}/other"))
    assert "not an allowed source" in refusal(fetcher)


def test_missing_credentials_are_told(
    s3: S3Host, fetcher: RemoteFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(FailedPreconditionError, match="no request to S3 can be signed") as caught:
        fetch(fetcher)
    assert caught.value.reason == "SOURCE_NOT_READABLE"


def test_the_extra_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(FailedPreconditionError, match=r"pip install 'deltaplane\[s3\]'"):
        check_installed()
