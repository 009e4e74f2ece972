"""The folder of uploaded adapters: who owns it, what is removed from it, and what a bad disk is called."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from deltaplane_controlplane.errors import FailedPreconditionError, InternalError, ResourceExhaustedError
from deltaplane_controlplane.upload_folder import ExpectedFile, Upload, UploadFolder
from fakes import CONFIG, write_adapter


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    folder = UploadFolder(tmp_path)
    with pytest.raises(FailedPreconditionError, match="another server uses it"):
        UploadFolder(tmp_path)
    folder.close()
    UploadFolder(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FailedPreconditionError, match=r"file: it cannot be used: File exists"):
        UploadFolder(tmp_path / "file")


def test_a_temporary_folder_is_gone_at_the_end() -> None:
    folder = UploadFolder(None)
    assert folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()


def test_only_uploads_are_discarded(tmp_path: Path) -> None:
    folder = UploadFolder(tmp_path / "uploads")
    other = write_adapter(tmp_path / ("upload-" + "0" * 32))
    for source in (other, folder.path, folder.path / "..", folder.path / "notes"):
        source.mkdir(exist_ok=True)
        folder.discard(source)
    folder.close()
    folder.discard(folder.path / ("upload-" + "0" * 32))
    assert (other / CONFIG).is_file()
    assert (folder.path / "notes").is_dir()


def test_a_discarded_upload_takes_no_more(tmp_path: Path) -> None:
    folder = UploadFolder(tmp_path)
    upload = Upload(folder, [ExpectedFile("", "x", 2, hashlib.sha256(b"ab").hexdigest())])
    upload.write(b"a")
    upload.discard()
    upload.write(b"b")
    assert list(tmp_path.iterdir()) == []
    folder.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, ResourceExhaustedError), (errno.EIO, InternalError)]
)
def test_a_failing_disk_has_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, "the disk says no")

    folder = UploadFolder(tmp_path)
    upload = Upload(folder, [ExpectedFile("", "x", 2, "")])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(kind, match="the disk says no"):
            upload.write(b"a")
    upload.discard()
    assert list(tmp_path.iterdir()) == []
    folder.close()
