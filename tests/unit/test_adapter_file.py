"""Reading one file of an adapter: in order or in pieces, whole or not at all."""

import hashlib
import os
from pathlib import Path

import pytest

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.adapters.files import open_folder
from deltaplane_server.adapters.load_threads import LoadThreads

CONTENT = bytes(range(251)) * 40_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


def test_the_digest_is_that_of_all_bytes(path: Path) -> None:
    digest = hashlib.sha256()
    with open_folder(path.parent) as folder, folder.open("file", digest) as file:
        assert file.read(7) + file.read(len(CONTENT) - 7) == CONTENT
        file.expect_end()
    assert digest.digest() == hashlib.sha256(CONTENT).digest()


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("num_bytes", [0, 1, 4 << 20, (8 << 20) + 1, len(CONTENT) - 3])
def test_pieces_make_up_the_next_bytes(path: Path, num_threads: int, num_bytes: int) -> None:
    digest = hashlib.sha256()
    buffer = bytearray(num_bytes)
    with open_folder(path.parent) as folder, folder.open("file", digest) as file:
        assert file.read(2) == CONTENT[:2]
        file.read_in_pieces(memoryview(buffer), LoadThreads(num_threads))
        assert buffer == CONTENT[2 : 2 + num_bytes]
        assert file.read(1) == CONTENT[2 + num_bytes : 3 + num_bytes]
    assert digest.digest() == hashlib.sha256(CONTENT[: num_bytes + 3]).digest()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_file_that_ends_early_or_goes_on(path: Path, num_threads: int) -> None:
    threads = LoadThreads(num_threads)
    with open_folder(path.parent) as folder, folder.open("file") as file:
        num_left = 5_000_000
        os.truncate(path, num_left)
        with pytest.raises(InvalidArgumentError, match=f"file ends {file.size - num_left} bytes early"):
            file.read_in_pieces(memoryview(bytearray(file.size)), threads)
        file.read_in_pieces(memoryview(bytearray(num_left - 1)), threads)
        with pytest.raises(InvalidArgumentError, match="file grew while it was read"):
            file.expect_end()
        file.read_into(memoryview(bytearray(1)))
        file.expect_end()


def test_a_file_that_is_written_to_while_it_is_open_has_no_state(path: Path) -> None:
    with open_folder(path.parent) as folder:
        with folder.open("file") as file:
            state = file.state_if_unchanged()
            assert state is not None
            assert (state.size, state.inode) == (len(CONTENT), path.stat().st_ino)
        with folder.open("file") as file:
            assert file.state_if_unchanged() == state
            path.write_bytes(CONTENT[:-1])
            assert file.state_if_unchanged() is None
