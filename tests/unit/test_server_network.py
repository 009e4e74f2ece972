"""Addresses: what can be listened on, what stays on this machine, and what is said otherwise."""

import socket
from collections.abc import Iterator

import pytest

from deltaplane_server.network import addresses, check_can_listen, is_loopback, join_host_port
from deltaplane_server.startup import StartupError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_in_use_is_named_with_its_flag(taken_port: int) -> None:
    with pytest.raises(
        StartupError, match=rf"^--port 127\.0\.0\.1:{taken_port}: the port is in use; .*another"
    ):
        check_can_listen("--port", "127.0.0.1", taken_port)


def test_all_addresses_overlap_one_that_is_taken(taken_port: int) -> None:
    with pytest.raises(StartupError, match="in use"):
        check_can_listen("--port", "0.0.0.0", taken_port)


def test_a_free_port_passes_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    check_can_listen("--port", "127.0.0.1", port)
    check_can_listen("--port", "localhost", port)
    check_can_listen("--port", "127.0.0.1", 0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartupError, match="this machine has no such address"):
        check_can_listen("--host", "192.0.2.1", 50051)


def test_a_name_without_address_is_refused() -> None:
    with pytest.raises(StartupError, match="use an IP address"):
        check_can_listen("--host", "no such host", 50051)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("127.1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("0", False),
        ("::", False),
        ("::ffff:0.0.0.0", False),
        ("10.0.0.1", False),
        ("169.254.0.1", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host, "--admin-host") is loopback


@pytest.mark.parametrize(
    "host", ["", "unix:/run/admin.sock", "unix-abstract:admin", "vsock:1:2", "127.0.0.1:80"]
)
def test_what_is_no_address_of_ip_is_refused(host: str) -> None:
    with pytest.raises(
        StartupError, match=r"^--admin-host: '.*' is no address of this machine .*; use an IP"
    ):
        is_loopback(host, "--admin-host")


def test_a_name_is_as_local_as_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /etc/hosts may have it; what is checked is then what is listened on."""
    elsewhere = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: elsewhere)
    assert addresses("localhost", "--admin-host") == ("127.0.0.1", "192.0.2.1")
    assert not is_loopback("localhost", "--admin-host")


def test_addresses_are_written_as_urls_have_them() -> None:
    assert join_host_port("0.0.0.0", 1) == "0.0.0.0:1"
    assert join_host_port("::1", 1) == join_host_port("[::1]", 1) == "[::1]:1"
