"""Fixtures that tests of more than one folder use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from control_plane import ControlPlane

# For --hypothesis-profile=fuzz, by hand.
settings.register_profile("fuzz", max_examples=20_000, print_blob=True)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """An adapter manager over fakes: 2 slots, 8 rank pages, 1000 bytes of host memory."""
    with ControlPlane(tmp_path) as plane:
        yield plane
