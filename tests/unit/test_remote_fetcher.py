"""Fetching adapters from a web server that fails in all ways: what arrives, what is refused, what is left."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certificates import Authority
from control_plane import eventually
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.errors import (
    CancelledError,
    DeltaplaneError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.ports import NO_PROGRESS, FetchedSource, Progress
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.remote.addresses import AllowedSources, parse_prefix
from deltaplane_server.adapters.remote.fetcher import FetchLimits, RemoteFetcher
from deltaplane_server.adapters.remote.host import FileBounds
from deltaplane_server.adapters.remote.retries import Retries
from http_host import (
    Fault,
    HttpHost,
    cut,
    drip,
    endless,
    http_host,
    redirect,
    stall,
    status,
    window,
    without_length,
    wrong_part,
)

CONFIG = b'{"r": 8}'
WEIGHTS = bytes(range(256)) * (3 << 12)
BOUNDS = FileBounds(max_config_bytes=1000, max_weights_bytes=4 << 20)
TRIES = 3
ADAPTER = "/adapters/a"
CONFIG_PATH, WEIGHTS_PATH = f"{ADAPTER}/{CONFIG_FILE}", f"{ADAPTER}/{WEIGHTS_FILE}"


@dataclass
class Watching:
    """Progress that remembers, and gives up once it is told to."""

    reports: list[tuple[str, int, int | None]] = field(default_factory=list)
    gave_up: threading.Event = field(default_factory=threading.Event)

    def report(self, stage: str, done: int, total: int | None) -> None:
        self.reports.append((stage, done, total))

    def check(self) -> None:
        if self.gave_up.is_set():
            raise CancelledError("the caller gave up")


@dataclass(frozen=True)
class Fetching:
    host: HttpHost
    fetcher: RemoteFetcher
    store: AdapterStore
    threads: ThreadPoolExecutor

    def fetch(self, path: str = ADAPTER, progress: Progress = NO_PROGRESS) -> FetchedSource:
        return self.fetcher.fetch(self.host.url + path, progress)

    def begin(self, path: str = ADAPTER, progress: Progress = NO_PROGRESS) -> "Future[FetchedSource]":
        return self.threads.submit(self.fetch, path, progress)

    def refusal(self, kind: type[DeltaplaneError] = InvalidArgumentError) -> DeltaplaneError:
        """The error of a fetch that leaves nothing behind."""
        with pytest.raises(kind) as caught:
            self.fetch()
        assert self.left() == []
        return caught.value

    def left(self) -> list[str]:
        return [entry.name for entry in self.store.path.iterdir()]


@contextmanager
def fetching(tmp_path: Path, **limits: float) -> Iterator[Fetching]:
    """A fetcher of what is under /adapters/ of the host, with nothing to wait for between tries."""
    store = AdapterStore(tmp_path / "store")
    with http_host({CONFIG_PATH: CONFIG, WEIGHTS_PATH: WEIGHTS}) as host, ThreadPoolExecutor(8) as threads:
        fetcher = RemoteFetcher(
            store,
            AllowedSources([parse_prefix(host.url + "/adapters/")]),
            BOUNDS,
            FetchLimits(retries=Retries(max_tries=TRIES, backoff_s=0.0), **limits),  # type: ignore[arg-type]
        )
        try:
            yield Fetching(host, fetcher, store, threads)
        finally:
            fetcher.close()
    store.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Fetching]:
    """One that takes nothing for a stall."""
    with fetching(tmp_path, stall_timeout_s=600.0) as net:
        yield net


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Fetching]:
    """One that soon takes silence for a stall."""
    with fetching(tmp_path, stall_timeout_s=0.5) as net:
        yield net


def check_arrived(net: Fetching, fetched: FetchedSource, weights: bytes = WEIGHTS) -> None:
    assert fetched.source == net.host.url + ADAPTER + "/"
    assert net.store.owns(fetched.folder)
    assert {file.name for file in fetched.folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    assert (fetched.folder / CONFIG_FILE).read_bytes() == CONFIG
    assert (fetched.folder / WEIGHTS_FILE).read_bytes() == weights


# What arrives.


def test_both_files_arrive_and_nothing_else(net: Fetching) -> None:
    fetched = net.fetch()
    check_arrived(net, fetched)
    assert net.left() == [fetched.folder.name]
    assert net.host.paths() == [CONFIG_PATH, WEIGHTS_PATH]


def test_progress_is_told_in_bytes(net: Fetching) -> None:
    watching = Watching()
    net.fetch(progress=watching)
    whole = len(CONFIG) + len(WEIGHTS)
    assert watching.reports[-1] == ("fetch", whole, whole)
    assert all(total in (None, whole) for _, _, total in watching.reports)


def test_an_address_with_odd_characters_is_asked_for_as_it_is_written(net: Fetching) -> None:
    net.host.files |= {f"/adapters/a%20%C3%BC/{name}": CONFIG for name in (CONFIG_FILE, WEIGHTS_FILE)}
    assert net.fetch("/adapters/a%20%c3%bc/").source == net.host.url + "/adapters/a%20%C3%BC/"


def test_a_server_that_tells_no_length_is_taken_at_its_word(net: Fetching) -> None:
    net.host.fail(WEIGHTS_PATH, without_length)
    watching = Watching()
    check_arrived(net, net.fetch(progress=watching))
    assert watching.reports[-1][1:] == (len(CONFIG) + len(WEIGHTS), None)


# What is tried again.

PASSING: dict[str, list[Fault | None]] = {
    "500": [status(500)],
    "503, then 429": [status(503, Retry_After="0"), status(429)],
    "408 and 502": [status(408), status(502)],
    "cut before the first byte": [cut(0)],
    "cut twice": [cut(1000), cut(2000)],
    "cut, then 500": [cut(1000), status(500)],
}


@pytest.mark.parametrize("case", PASSING)
@pytest.mark.parametrize("path", [CONFIG_PATH, WEIGHTS_PATH])
def test_what_may_pass_is_tried_again(net: Fetching, path: str, case: str) -> None:
    net.host.fail(path, *PASSING[case])
    check_arrived(net, net.fetch())


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_a_stalled_file_goes_on_where_it_stalled(hasty: Fetching, num_bytes: int) -> None:
    hasty.host.fail(WEIGHTS_PATH, stall(num_bytes))
    check_arrived(hasty, hasty.fetch())
    assert hasty.host.offsets(WEIGHTS_PATH) == [None, num_bytes or None]


def test_a_server_that_stays_silent_is_unavailable(hasty: Fetching) -> None:
    hasty.host.fail(WEIGHTS_PATH, *[stall(0)] * TRIES)
    assert "it sends nothing any more" in hasty.refusal(UnavailableError).message


@pytest.mark.parametrize(("path", "come"), [(CONFIG_PATH, 4), (WEIGHTS_PATH, 1 << 16)])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up(tmp_path: Path, path: str, come: int) -> None:
    with fetching(tmp_path, stall_timeout_s=600.0, total_timeout_s=1.0) as net:
        contents = {CONFIG_PATH: b'{"r": 8}' + b" " * 900, WEIGHTS_PATH: WEIGHTS}
        net.host.files.update(contents)
        net.host.faults[path].append(drip(come))
        error = net.refusal(UnavailableError)
        assert isinstance(error, UnavailableError)
        assert (error.reason, error.retry_after_s) == ("SOURCE_TOO_SLOW", 30.0)
        before, _, after = error.message.partition(" bytes have come; try later, or raise --fetch-timeout")
        what, _, bytes_come = before.partition(" cannot be fetched within 1 s: ")
        received, _, total = bytes_come.partition(" of ")
        assert (what, after) == (f"{net.host.url}{ADAPTER}/", "")
        known = 0 if path == CONFIG_PATH else len(contents[CONFIG_PATH])
        assert come + known <= int(received) < come + known + 200
        assert total == ("" if path == CONFIG_PATH else str(known + len(WEIGHTS)))
        assert net.host.left.wait(30)
        assert (net.fetch().folder / WEIGHTS_FILE).read_bytes() == WEIGHTS


def test_tries_have_one_time_for_all(tmp_path: Path) -> None:
    """Each comes further, and so could go on for as long as the file is large."""
    with fetching(tmp_path, stall_timeout_s=0.2, total_timeout_s=0.5) as net:
        net.host.has_ranges = False
        net.host.faults[WEIGHTS_PATH].extend([stall(1 << 20), stall(2 << 20), stall(0), stall(0), stall(0)])
        assert net.refusal(UnavailableError).reason == "SOURCE_TOO_SLOW"


def test_a_cut_file_goes_on_where_it_was_cut(net: Fetching) -> None:
    net.host.fail(WEIGHTS_PATH, cut(1 << 20), cut(1 << 20))
    check_arrived(net, net.fetch())
    assert net.host.offsets(WEIGHTS_PATH) == [None, 1 << 20, 2 << 20]


def test_a_server_that_sends_small_parts_is_asked_for_the_next(net: Fetching) -> None:
    """Parts of less than what counts as an advance, but more of them than there are tries."""
    net.host.fail(WEIGHTS_PATH, cut(1 << 20), *[window(600 << 10)] * TRIES)
    check_arrived(net, net.fetch())
    offsets = net.host.offsets(WEIGHTS_PATH)
    assert offsets == [None, *((1 << 20) + number * (600 << 10) for number in range(TRIES + 1))]


def test_tries_that_come_further_do_not_count(net: Fetching) -> None:
    """The file comes in more pieces than there are tries."""
    net.host.files[WEIGHTS_PATH] = weights = bytes(4 << 20)
    net.host.fail(WEIGHTS_PATH, *[cut(1 << 20)] * 3, status(500), status(500))
    check_arrived(net, net.fetch(), weights)


@pytest.mark.parametrize("field", ["has_etags", "has_ranges"])
def test_a_server_that_cannot_go_on_begins_anew(net: Fetching, field: str) -> None:
    setattr(net.host, field, False)
    net.host.fail(WEIGHTS_PATH, cut(2 << 20))
    check_arrived(net, net.fetch())
    expected = None if field == "has_etags" else 2 << 20
    assert net.host.offsets(WEIGHTS_PATH) == [None, expected]


def test_a_file_that_changed_meanwhile_begins_anew(net: Fetching) -> None:
    def change(host: HttpHost, handler: object, content: bytes) -> None:
        cut(1 << 20)(host, handler, content)  # type: ignore[arg-type]
        host.files[WEIGHTS_PATH] = WEIGHTS[::-1]

    net.host.fail(WEIGHTS_PATH, change)
    check_arrived(net, net.fetch(), WEIGHTS[::-1])


def test_a_changed_file_is_not_put_together_even_where_if_range_is_ignored(net: Fetching) -> None:
    """The part that comes has another ETag than the one before it."""

    def change(host: HttpHost, handler: object, content: bytes) -> None:
        cut(1 << 20)(host, handler, content)  # type: ignore[arg-type]
        host.files[WEIGHTS_PATH] = WEIGHTS[::-1]

    net.host.fail(WEIGHTS_PATH, change, wrong_part(0))
    check_arrived(net, net.fetch(), WEIGHTS[::-1])
    assert net.host.offsets(WEIGHTS_PATH) == [None, 1 << 20, None]


def test_whatever_fails_no_file_is_put_together_of_two(tmp_path: Path) -> None:
    """Cuts, errors, wrong parts and changes of the file, in any order, on servers of several kinds."""
    versions = [bytes([digit]) * 1000 for digit in range(10)]

    def next_version(host: HttpHost, handler: object, content: bytes) -> None:
        number = versions.index(host.files[WEIGHTS_PATH])
        cut(500)(host, handler, content)  # type: ignore[arg-type]
        host.files[WEIGHTS_PATH] = versions[number + 1]

    faults = st.one_of(
        st.integers(0, 999).map(cut),
        st.integers(-3, 3).map(wrong_part),
        st.sampled_from([status(500), status(416), next_version]),
    )

    with fetching(tmp_path) as net:

        @given(st.lists(faults, max_size=6), st.booleans(), st.booleans())
        @settings(max_examples=30, deadline=None)
        def check(failing: list[Fault], has_etags: bool, has_ranges: bool) -> None:
            net.host.files[WEIGHTS_PATH] = versions[0]
            net.host.faults.clear()
            net.host.fail(WEIGHTS_PATH, *failing)
            net.host.has_etags, net.host.has_ranges = has_etags, has_ranges
            try:
                folder = net.fetch().folder
            except (UnavailableError, InvalidArgumentError):
                return
            assert (folder / WEIGHTS_FILE).read_bytes() in versions

        check()


@pytest.mark.parametrize(
    "answer", [wrong_part(-1), wrong_part(1), status(416), status(206, b"xy", ETag='"x"')], ids=range(4)
)
def test_a_wrong_part_begins_anew(net: Fetching, answer: Fault) -> None:
    net.host.fail(WEIGHTS_PATH, cut(1 << 20), answer)
    check_arrived(net, net.fetch())
    assert net.host.offsets(WEIGHTS_PATH) == [None, 1 << 20, None]


# What is given up.

FAILING: dict[str, tuple[list[Fault], str]] = {
    "500": ([status(500)] * TRIES, "it answers 500"),
    "S3's": ([status(503, b"<Error><Code>SlowDown</Code></Error>")] * TRIES, "it answers 503 (SlowDown)"),
    "cut": ([cut(0)] * TRIES, "the connection to it broke"),
    "cut in the same place": ([cut(1 << 20)] * (TRIES + 1), "the connection to it broke"),
}


@pytest.mark.parametrize("case", FAILING)
def test_what_does_not_pass_is_unavailable(net: Fetching, case: str) -> None:
    net.host.has_ranges = net.host.has_etags = False
    faults, told = FAILING[case]
    net.host.fail(WEIGHTS_PATH, *faults)
    error = net.refusal(UnavailableError)
    assert error.reason == "SOURCE_UNAVAILABLE"
    assert error.message == f"{net.host.url}{WEIGHTS_PATH} cannot be fetched now: {told}"


def test_a_time_to_come_back_is_passed_on(net: Fetching) -> None:
    net.host.fail(CONFIG_PATH, *[status(503)] * (TRIES - 1), status(503, Retry_After="77"))
    error = net.refusal(UnavailableError)
    assert isinstance(error, UnavailableError)
    assert error.retry_after_s == 77


def test_a_server_that_is_not_there_is_unavailable(net: Fetching) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        fetcher = RemoteFetcher(
            net.store,
            AllowedSources([parse_prefix(address)]),
            BOUNDS,
            FetchLimits(retries=Retries(TRIES, 0.0)),
        )
        with pytest.raises(UnavailableError, match="there is no connection to it"):
            fetcher.fetch(f"{address}/a", NO_PROGRESS)
        fetcher.close()


REFUSED: dict[str, tuple[Fault, str, str]] = {
    "404": (status(404), "SOURCE_NOT_READABLE", "does not exist: the server answers 404"),
    "410": (status(410), "SOURCE_NOT_READABLE", "does not exist: the server answers 410"),
    "401": (
        status(401),
        "SOURCE_NOT_READABLE",
        "is refused with 401: check its address, and the credentials",
    ),
    "403": (
        status(403, b"<?xml?><Error><Code>AccessDenied</Code></Error>"),
        "SOURCE_NOT_READABLE",
        "is refused with 403 (AccessDenied)",
    ),
    "the hub's 403": (
        status(403, X_Error_Code="GatedRepo"),
        "SOURCE_NOT_READABLE",
        "is refused with 403 (GatedRepo)",
    ),
    "400": (status(400), "SOURCE_NOT_READABLE", "cannot be fetched: the server answers 400"),
    "a part that nobody asked for": (status(206), "SOURCE_NOT_READABLE", "the server answers 206"),
    "compressed": (status(200, b"x", Content_Encoding="gzip"), "SOURCE_NOT_READABLE", "is sent compressed"),
    "a redirect to nowhere": (status(302), "SOURCE_NOT_READABLE", "the server answers 302"),
    "too long": (status(200, bytes(4097 << 10)), "ADAPTER_TOO_LARGE", "at most 4194304"),
    "endless": (endless, "ADAPTER_TOO_LARGE", "at most 4194304"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_will_not_pass_is_refused_at_once(net: Fetching, case: str) -> None:
    fault, reason, told = REFUSED[case]
    net.host.fail(WEIGHTS_PATH, fault)
    error = net.refusal()
    assert error.reason == reason
    assert told in error.message
    assert f"{net.host.url}{WEIGHTS_PATH}" in error.message
    assert len(net.host.offsets(WEIGHTS_PATH)) == 1


def test_a_file_that_grows_past_its_bound_after_a_cut_is_refused(net: Fetching) -> None:
    net.host.files[WEIGHTS_PATH] = bytes(5 << 20)
    net.host.has_ranges = False
    net.host.fail(
        WEIGHTS_PATH, lambda host, handler, content: cut(1 << 20)(host, handler, content[: 2 << 20])
    )
    assert net.refusal().reason == "ADAPTER_TOO_LARGE"


def test_each_file_has_its_own_bound(net: Fetching) -> None:
    net.host.files[CONFIG_PATH] = bytes(1001)
    assert "1001 bytes or more; one that can be served here has at most 1000" in net.refusal().message


# Where a server may send its client.


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_to_an_allowed_place_is_followed(net: Fetching, code: int) -> None:
    net.host.files["/adapters/cdn/weights"] = WEIGHTS
    net.host.fail(WEIGHTS_PATH, redirect(f"{net.host.url}/adapters/cdn/weights?signature=s", code))
    check_arrived(net, net.fetch())
    assert net.host.paths()[-1] == "/adapters/cdn/weights?signature=s"


def test_a_file_goes_on_behind_a_redirect(net: Fetching) -> None:
    net.host.files["/adapters/cdn"] = WEIGHTS
    net.host.fail(WEIGHTS_PATH, redirect("/adapters/cdn"), redirect("../cdn"))
    net.host.fail("/adapters/cdn", cut(1 << 20))
    check_arrived(net, net.fetch())
    assert net.host.offsets("/adapters/cdn") == [None, 1 << 20]


@pytest.mark.parametrize(
    "location",
    [
        "{host}/other/file",
        "/other",
        "//127.0.0.2/adapters/a",
        "{host}/adapters/../other",
        "{host}/adapters/%2e%2e/other",
        "http://localhost/adapters/a",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "https://user:secret@example.com/adapters/a",
    ],
)
def test_a_redirect_to_any_other_place_is_not(net: Fetching, location: str) -> None:
    net.host.fail(CONFIG_PATH, redirect(location.format(host=net.host.url)))
    error = net.refusal()
    assert error.reason == "SOURCE_NOT_ALLOWED"
    assert "secret" not in error.message
    assert net.host.paths() == [CONFIG_PATH]


@pytest.mark.parametrize("location", ["http://[::1/adapters/a", "http://[x]/"])
def test_a_redirect_to_what_is_no_address_is_told(net: Fetching, location: str) -> None:
    net.host.fail(CONFIG_PATH, redirect(location))
    assert "leads to" in net.refusal().message


def test_redirects_come_to_an_end(net: Fetching) -> None:
    net.host.fail(CONFIG_PATH, *[redirect(CONFIG_PATH)] * 10)
    assert "sends its client on more than 5 times" in net.refusal().message


@pytest.mark.parametrize(
    "source", ["{host}/other/a", "hf://org/name", "s3://bucket/a", "https://127.0.0.1/a"]
)
def test_what_is_not_allowed_is_not_asked_for(net: Fetching, source: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not an allowed source") as caught:
        net.fetcher.fetch(source.format(host=net.host.url), NO_PROGRESS)
    assert caught.value.reason == "SOURCE_NOT_ALLOWED"
    assert net.host.paths() == []


# Certificates and credentials.


@pytest.mark.parametrize("trusted", [True, False])
def test_a_server_must_show_a_certificate_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    monkeypatch.setenv("SSL_CERT_FILE", str((authority if trusted else other).file))
    store = AdapterStore(tmp_path / "store")
    with http_host({CONFIG_PATH: CONFIG, WEIGHTS_PATH: WEIGHTS}, authority.issue()) as host:
        allowed = AllowedSources([parse_prefix(host.url)])
        fetcher = RemoteFetcher(store, allowed, BOUNDS, FetchLimits(retries=Retries(TRIES, 0.0)))
        if trusted:
            assert (
                fetcher.fetch(host.url + ADAPTER, NO_PROGRESS).folder / WEIGHTS_FILE
            ).read_bytes() == WEIGHTS
        else:
            with pytest.raises(UnavailableError, match="its certificate is not trusted: "):
                fetcher.fetch(host.url + ADAPTER, NO_PROGRESS)
        fetcher.close()
    store.close()


def test_credentials_come_from_netrc_and_go_nowhere_else(
    net: Fetching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine 127.0.0.1 login me password secret\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    with http_host({"/w": WEIGHTS}) as other:
        allowed = AllowedSources([parse_prefix(net.host.url), parse_prefix(other.url)])
        fetcher = RemoteFetcher(net.store, allowed, BOUNDS)
        net.host.fail(WEIGHTS_PATH, redirect(f"{other.url}/w"))
        fetcher.fetch(net.host.url + ADAPTER, NO_PROGRESS)
        fetcher.close()
        assert [asked.headers["authorization"] for asked in net.host.asked] == ["Basic bWU6c2VjcmV0"] * 2
        assert "authorization" not in other.asked[0].headers


# Sharing, giving up, bounds.


def test_callers_of_one_address_share_one_fetch_and_have_folders_of_their_own(net: Fetching) -> None:
    gate = threading.Event()

    def wait(host: HttpHost, handler: object, content: bytes) -> None:
        gate.wait(30)
        cut(len(content))(host, handler, content)  # type: ignore[arg-type]

    net.host.fail(WEIGHTS_PATH, wait)
    calls = [net.begin(path) for path in (ADAPTER, ADAPTER + "/", "/%61dapters/a")]
    eventually(lambda: net.fetcher.waiting == 3, "all to wait")
    gate.set()
    folders = {call.result().folder for call in calls}
    assert len(folders) == 3
    assert net.host.paths() == [CONFIG_PATH, WEIGHTS_PATH]
    assert set(net.left()) == {folder.name for folder in folders}
    for call in calls:
        check_arrived(net, call.result())
    net.store.discard(folders.pop())
    for folder in folders:
        assert (folder / WEIGHTS_FILE).read_bytes() == WEIGHTS


def test_a_fetch_that_nobody_waits_for_ends_and_leaves_nothing(net: Fetching) -> None:
    net.host.fail(WEIGHTS_PATH, stall(1 << 20), stall(1 << 20), stall(1 << 20))
    first, second = Watching(), Watching()
    calls = [net.begin(progress=progress) for progress in (first, second)]
    assert net.host.stalled.wait(30)
    first.gave_up.set()
    with pytest.raises(CancelledError):
        calls[0].result()
    assert [name[:7] for name in net.left()] == [".fetch-"]
    second.gave_up.set()
    with pytest.raises(CancelledError):
        calls[1].result()
    assert net.host.left.wait(30)
    eventually(lambda: net.left() == [], "the removal of what had come")
    net.host.faults.clear()
    check_arrived(net, net.fetch())


def test_one_who_gives_up_does_not_end_it_for_others(net: Fetching) -> None:
    net.host.fail(WEIGHTS_PATH, stall(1 << 20))
    gives_up = Watching()
    calls = [net.begin(progress=gives_up), net.begin()]
    eventually(lambda: net.fetcher.waiting == 2, "both to wait")
    gives_up.gave_up.set()
    with pytest.raises(CancelledError):
        calls[0].result()
    net.host.released.set()
    check_arrived(net, calls[1].result())


def test_few_come_at_once_and_few_more_wait(tmp_path: Path) -> None:
    with fetching(tmp_path, max_at_once=1, max_under_way=2) as net:
        net.host.files |= {
            f"/adapters/{i}/{name}": CONFIG for i in "bc" for name in (CONFIG_FILE, WEIGHTS_FILE)
        }
        net.host.fail(WEIGHTS_PATH, stall(0))
        first = net.begin()
        assert net.host.stalled.wait(30)
        second = net.begin("/adapters/b")
        eventually(lambda: net.fetcher.waiting == 2, "the second to wait")
        with pytest.raises(ResourceExhaustedError, match="2 adapters are being fetched") as caught:
            net.fetch("/adapters/c")
        assert caught.value.reason == "TOO_MANY_FETCHES"
        assert "/adapters/b" not in " ".join(net.host.paths())
        net.host.released.set()
        check_arrived(net, first.result())
        second.result()
        net.fetch("/adapters/c")


def test_a_closed_fetcher_ends_what_is_under_way(tmp_path: Path) -> None:
    with fetching(tmp_path) as net:
        net.host.fail(WEIGHTS_PATH, stall(1 << 20))
        call = net.begin()
        assert net.host.stalled.wait(30)
        net.fetcher.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            call.result()
        with pytest.raises(UnavailableError, match="shutting down"):
            net.fetch()
        assert net.left() == []


def test_a_full_disk_is_told(net: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    error = net.refusal(ResourceExhaustedError)
    assert error.reason == "ADAPTER_STORE_FULL"
    assert "No space left on device" in error.message
