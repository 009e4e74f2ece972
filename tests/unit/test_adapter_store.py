"""The server's own folder of adapters: who owns it, what is removed from it, what a bad disk is called."""

import errno
import os
from pathlib import Path

import pytest

from deltaplane_controlplane.adapter_store import AdapterStore, IncomingFolder
from deltaplane_controlplane.errors import FailedPreconditionError, InternalError, ResourceExhaustedError
from deltaplane_controlplane.upload_files import ExpectedFile, Upload
from fakes import CONFIG, write_adapter

UPLOAD, FETCH = "upload-" + "0" * 32, "fetch-" + "1" * 32


def incoming(store: AdapterStore, content: bytes = b"files") -> IncomingFolder:
    folder = IncomingFolder(store, "fetch")
    with folder.create(CONFIG) as file:
        file.write(content)
    return folder


def test_a_store_has_one_owner(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    with pytest.raises(FailedPreconditionError, match="another server uses it"):
        AdapterStore(tmp_path)
    store.close()
    AdapterStore(tmp_path).close()


def test_a_store_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FailedPreconditionError, match=r"file: it cannot be used: File exists"):
        AdapterStore(tmp_path / "file")


def test_a_temporary_store_is_gone_at_the_end() -> None:
    store = AdapterStore(None)
    assert store.path.is_dir()
    store.close()
    assert not store.path.exists()


def test_only_folders_of_adapters_are_discarded(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    other = write_adapter(tmp_path / UPLOAD)
    for source in (other, store.path, store.path / "..", store.path / "notes"):
        source.mkdir(exist_ok=True)
        store.discard(source)
    store.close()
    store.discard(store.path / UPLOAD)
    assert (other / CONFIG).is_file()
    assert (store.path / "notes").is_dir()


def test_a_sweep_leaves_what_is_needed_and_what_is_not_the_stores(tmp_path: Path) -> None:
    for name in (UPLOAD, "upload-" + "2" * 32, FETCH, "fetch-" + "3" * 32, f".{FETCH}", "notes", "fetch-1"):
        (tmp_path / name).mkdir()
    store = AdapterStore(tmp_path)
    store.sweep([str(tmp_path / UPLOAD), str(tmp_path / FETCH)])
    store.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {UPLOAD, FETCH, "notes", "fetch-1"}


def test_a_folder_is_hidden_until_it_is_in_its_place(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    folder = incoming(store)
    assert [entry.name[:7] for entry in tmp_path.iterdir()] == [".fetch-"]
    place = folder.commit()
    assert store.owns(place)
    assert list(tmp_path.iterdir()) == [place]
    folder.discard()
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_what_was_lost_is_put_back_in_its_place(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    place = incoming(store, b"damaged").commit()
    store.put_back(incoming(store, b"whole").commit(), place)
    assert list(tmp_path.iterdir()) == [place]
    assert (place / CONFIG).read_bytes() == b"whole"
    store.close()


def test_a_discarded_upload_takes_no_more(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    upload = Upload(store, [ExpectedFile("", "x", 2, "")])
    upload.write(b"a")
    upload.discard()
    upload.write(b"b")
    assert list(tmp_path.iterdir()) == []
    store.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, ResourceExhaustedError), (errno.EIO, InternalError)]
)
def test_a_failing_disk_has_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, "the disk says no")

    store = AdapterStore(tmp_path)
    upload = Upload(store, [ExpectedFile("", "x", 2, "")])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(kind, match="the disk says no"):
            upload.write(b"a")
    upload.discard()
    assert list(tmp_path.iterdir()) == []
    store.close()
