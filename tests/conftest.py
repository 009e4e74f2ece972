"""Fixtures that tests of more than one folder use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import ControlPlane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """An adapter manager over fakes: 2 slots, 8 rank pages, 1000 bytes of host memory."""
    with ControlPlane(tmp_path) as plane:
        yield plane
