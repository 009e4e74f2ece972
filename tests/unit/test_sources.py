"""Which folders an adapter may come from: no way out by links, names or races, and nothing without bound."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.sources import MAX_ENTRIES, MAX_SOURCE_LENGTH, AllowedRoots
from deltaplane_server.adapters.files import CONFIG_FILE, open_folder


class Places:
    """root: allowed, has adapter/. outside: not allowed, has adapter/ and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.root, self.outside = folder / "root", folder / "outside"
        for place in (self.root, self.outside):
            (place / "adapter").mkdir(parents=True)
            (place / "adapter" / CONFIG_FILE).write_text(place.name)
        (self.outside / "empty").mkdir()
        self.roots = AllowedRoots([self.root])

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    def refusal(self, source: str | Path) -> InvalidArgumentError:
        with pytest.raises(InvalidArgumentError) as caught:
            self.roots.resolve(str(source))
        assert [violation.field for violation in caught.value.violations] == ["source"]
        return caught.value


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


OUTSIDE: dict[str, Callable[[Places], str]] = {
    "itself": lambda p: str(p.outside / "adapter"),
    "the root's parent": lambda p: str(p.root.parent),
    "the root of the machine": lambda p: "/",
    "up and down": lambda p: f"{p.root}/../outside/adapter",
    "up from a folder": lambda p: f"{p.adapter}/../../outside/adapter",
    "up from what is not there": lambda p: f"{p.root}/none/../../outside/adapter",
    "slashes and dots": lambda p: f"//{str(p.root)[1:]}/.//./../outside//adapter/.",
    "a name that begins as the root's": lambda p: f"{p.root}-too",
    "far above the root of the machine": lambda p: "/.." * 40 + str(p.outside),
    "another process's view": lambda p: f"/proc/self/root{p.outside}/adapter",
}


@pytest.mark.parametrize("source", OUTSIDE.values(), ids=OUTSIDE)
def test_paths_that_lead_outside(places: Places, source: Callable[[Places], str]) -> None:
    error = places.refusal(source(places))
    assert error.reason == "SOURCE_NOT_ALLOWED"
    assert str(places.root) in error.message


def test_what_is_outside_is_not_told(places: Places) -> None:
    """Neither whether it is there nor what it is."""
    (places.root / "dangling").symlink_to(places.outside / "none")
    (places.root / "to file").symlink_to(places.outside / "adapter" / CONFIG_FILE)
    sources = [places.outside / name for name in ("adapter", "none", f"adapter/{CONFIG_FILE}", "none/none")]
    sources += [places.root / "dangling", places.root / "to file", places.root / "dangling" / "none"]
    said = {places.refusal(source).message.replace(repr(str(source)), "it") for source in sources}
    assert len(said) == 1


LINKS: dict[str, Callable[[Places], str]] = {
    "to a folder": lambda p: link(p.root / "link", p.outside / "adapter"),
    "to an empty folder": lambda p: link(p.root / "link", p.outside / "empty"),
    "to the parent of a folder": lambda p: link(p.root / "link", p.outside) + "/adapter",
    "relative": lambda p: link(p.root / "link", Path("../outside/adapter")),
    "to a link": lambda p: link(p.root / "link", Path(link(p.root / "other", p.outside / "adapter"))),
    "in the middle of a path": lambda p: link(p.adapter / "link", p.outside) + "/adapter",
    "and back by its parent": lambda p: link(p.root / "link", p.outside / "adapter") + "/../empty",
    "of a file": lambda p: str(Path(link(p.adapter / "weights", p.outside / "adapter" / CONFIG_FILE)).parent),
    "of a folder in it": lambda p: str(Path(link(p.adapter / "more", p.outside)).parent),
    "of what is not there": lambda p: str(Path(link(p.adapter / "none", p.outside / "none")).parent),
    "to itself, and up": lambda p: link(p.root / "loop", Path("loop")) + "/../../outside/adapter",
}


def link(path: Path, target: Path) -> str:
    path.symlink_to(target)
    return str(path)


@pytest.mark.parametrize("source", LINKS.values(), ids=LINKS)
def test_links_that_lead_outside(places: Places, source: Callable[[Places], str]) -> None:
    assert places.refusal(source(places)).reason == "SOURCE_NOT_ALLOWED"


@pytest.mark.parametrize("target", ["adapter", "empty"])
def test_a_loop_does_not_hide_the_link_behind_it(places: Places, target: str) -> None:
    """realpath gives up at a loop, and leaves a link that comes after it as it is."""
    link(places.root / "loop", Path("loop"))
    link(places.root / "link", places.outside / target)
    assert "Too many levels of symbolic links" in places.refusal(f"{places.root}/loop/../link").message


def test_links_that_stay_inside(places: Places) -> None:
    inside = link(places.root / "link", Path("adapter"))
    link(places.adapter / "also", places.adapter / CONFIG_FILE)
    for source in (inside, f"{inside}/.", f"{places.root}/link/../adapter", f"{places.outside}/../root/link"):
        assert places.roots.resolve(source) == places.adapter


def test_a_root_that_is_a_link_is_the_folder_that_it_led_to(tmp_path: Path) -> None:
    places = Places(tmp_path)
    alias = Path(link(tmp_path / "alias", places.root))
    places.roots = AllowedRoots([alias])
    assert places.roots.resolve(str(alias / "adapter")) == places.adapter
    assert places.roots.resolve(str(places.adapter)) == places.adapter
    alias.unlink()
    alias.symlink_to(places.outside)
    assert places.refusal(alias / "adapter").reason == "SOURCE_NOT_ALLOWED"


def test_the_root_itself_may_be_an_adapter(places: Places) -> None:
    assert AllowedRoots([places.adapter]).resolve(str(places.adapter)) == places.adapter


def test_without_roots_there_is_nothing(places: Places) -> None:
    places.roots = AllowedRoots()
    assert "start the server with --adapter-roots" in places.refusal(places.adapter).message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "SOURCE_NOT_READABLE"),
        (f"adapter/{CONFIG_FILE}", "SOURCE_NOT_READABLE"),
        ("n" * 300, "SOURCE_NOT_READABLE"),
        ("n/" * 1500, "SOURCE_NOT_READABLE"),
        ("a\0b", "SOURCE_NOT_ALLOWED"),
        ("n/" * MAX_SOURCE_LENGTH, "SOURCE_NOT_ALLOWED"),
        ("./" * MAX_SOURCE_LENGTH + "adapter", "SOURCE_NOT_ALLOWED"),
    ],
    ids=lambda value: value[:20].replace("\0", "NUL"),
)
def test_names_inside_that_are_no_folder(places: Places, name: str, reason: str) -> None:
    error = places.refusal(f"{places.root}/{name}")
    assert error.reason == reason
    assert len(error.message) < 2 * MAX_SOURCE_LENGTH


def test_names_are_taken_as_they_are(places: Places) -> None:
    """Nothing is decoded, expanded or made one with what looks like it."""
    names = ("%2e%2e", "..%2foutside", "~", "$HOME", "..\\outside", "\uff41dapter", ".. ", "...", "\u2025")
    for name in names:
        assert places.refusal(places.root / name).reason == "SOURCE_NOT_READABLE"
        (places.root / name).mkdir()
        assert places.roots.resolve(f"{places.root}/{name}") == places.root / name


@given(
    st.lists(
        st.sampled_from(["..", ".", "", "root", "outside", "adapter", "in", "out", "up", "loop", "none"]),
        max_size=12,
    )
)
def test_no_path_leads_outside(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    places = Places(tmp_path_factory.mktemp("places"))
    for name, target in (("in", "adapter"), ("out", "../outside"), ("up", ".."), ("loop", "loop")):
        link(places.root / name, Path(target))
    source = os.path.join(places.root, *(part for part in parts if part != ""))
    try:
        found = places.roots.resolve(source)
    except InvalidArgumentError:
        return
    with open_folder(found) as folder:
        opened = Path(os.readlink(f"/proc/self/fd/{folder._descriptor}"))
    assert opened == found
    assert opened.is_relative_to(places.root)


def test_a_folder_with_too_many_entries(places: Places) -> None:
    many = places.root / "many"
    many.mkdir()
    for number in range(MAX_ENTRIES):
        (many / str(number)).touch()
    assert places.roots.resolve(str(many)) == many
    (many / "last").touch()
    assert f"has over {MAX_ENTRIES} entries" in places.refusal(many).message


# Between the check and the opening.


@pytest.mark.parametrize("part", ["root", "root/team", "root/team/adapter"])
def test_what_becomes_a_link_after_the_check_is_not_followed(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "root" / "team" / "adapter"
    folder.mkdir(parents=True)
    found = AllowedRoots([tmp_path / "root"]).resolve(str(folder))
    moved = tmp_path / "moved"
    (tmp_path / part).rename(moved)
    (tmp_path / part).symlink_to(moved)
    assert folder.is_dir()  # by way of the link
    with pytest.raises(InvalidArgumentError, match="Not a directory"), open_folder(found):
        pass


def test_a_file_that_becomes_a_link_after_the_check_is_not_followed(places: Places) -> None:
    found = places.roots.resolve(str(places.adapter))
    with open_folder(found) as folder:
        (places.adapter / CONFIG_FILE).unlink()
        link(places.adapter / CONFIG_FILE, places.outside / "adapter" / CONFIG_FILE)
        with pytest.raises(InvalidArgumentError, match="is a symbolic link"), folder.open(CONFIG_FILE):
            pass


def test_a_folder_that_is_moved_while_it_is_open_is_still_the_one_that_was_checked(places: Places) -> None:
    with open_folder(places.roots.resolve(str(places.adapter))) as folder:
        places.adapter.rename(places.root / "away")
        link(places.adapter, places.outside / "adapter")
        with folder.open(CONFIG_FILE) as file:
            assert file.read(file.size) == b"root"
