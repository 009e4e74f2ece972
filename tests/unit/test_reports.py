"""Lists of adapters, whose pages and counts are made in batches."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import ControlPlane
from deltaplane_controlplane import reports
from deltaplane_controlplane.versions import AdapterState, Tier
from deltaplane_controlplane.views import AdapterPage

NAMES = [f"{kind}-{number}" for kind in ("law", "tax") for number in range(5)]


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """Ten adapters: law-0 is resident, law-1 in host memory."""
    monkeypatch.setattr(reports, "_BATCH", 3)
    with ControlPlane(tmp_path) as plane:
        plane.add(*NAMES)
        plane.manager.load("law-0", Tier.DEVICE)
        plane.manager.load("law-1", Tier.HOST)
        yield plane


def pages(plane: ControlPlane, size: int, filter: str) -> list[AdapterPage]:
    found = [plane.manager.list_adapters(page_size=size, filter=filter)]
    while token := found[-1].next_page_token:
        found.append(plane.manager.list_adapters(page_size=size, page_token=token, filter=filter))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 10, 11])
@pytest.mark.parametrize(
    ("filter", "names"),
    [
        ("", NAMES),
        ("  ", NAMES),
        ("name:tax*", NAMES[5:]),
        ("state=HOST", ["law-1"]),
        ("name:law* AND state=REGISTERED", NAMES[2:5]),
        ("state=FAILED", []),
    ],
)
def test_pages_have_each_adapter_once(plane: ControlPlane, size: int, filter: str, names: list[str]) -> None:
    found = pages(plane, size, filter)
    assert [adapter.name for page in found for adapter in page.adapters] == names
    assert all(len(page.adapters) == size for page in found[:-1])
    assert len(found) == max(1, -(-len(names) // size)), "no page is empty unless the list is"
    assert {page.total_size for page in found} == {len(names)}


def test_a_page_shows_what_a_question_for_one_adapter_does(plane: ControlPlane) -> None:
    [page] = pages(plane, 0, "")
    assert list(page.adapters) == [plane.manager.get(name) for name in NAMES]
    assert [adapter.lru_position for adapter in page.adapters[:2]] == [0, None]


def test_a_page_goes_on_where_an_adapter_was_deleted(plane: ControlPlane) -> None:
    first = plane.manager.list_adapters(page_size=3)
    plane.manager.delete("law-2")
    second = plane.manager.list_adapters(page_size=3, page_token=first.next_page_token)
    assert [adapter.name for adapter in second.adapters] == NAMES[3:6]
    assert second.total_size == len(NAMES) - 1


def test_every_state_is_counted(plane: ControlPlane) -> None:
    lease = plane.manager.lease("tax-4")
    plane.manager.delete("tax-4")
    plane.fetcher.gate.clear()
    fetch = plane.manager.calls.register("tax-9", "fake://x")
    assert plane.manager.count_states() == {
        AdapterState.FETCHING: 1,
        AdapterState.REGISTERED: 7,
        AdapterState.LOADING: 0,
        AdapterState.HOST: 1,
        AdapterState.RESIDENT: 1,
        AdapterState.DRAINING: 1,
        AdapterState.FAILED: 0,
    }
    lease.release()
    fetch.leave()
