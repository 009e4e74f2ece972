"""Addresses: whether one can be listened on, and whether it stays on this machine."""

import errno
import ipaddress
import socket

from deltaplane_server.startup import StartupError


def join_host_port(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def addresses(host: str, flag: str) -> tuple[str, ...]:
    """The IP addresses of `host`. To listen on them, and not on the name, is to listen on what was checked.

    flag: the name of the option, for the message. Errors: StartupError, where the name has no address.
    """
    return tuple(dict.fromkeys(address for _, (address, _) in _resolve(host, 0, flag)))


def is_loopback(host: str, flag: str) -> bool:
    """Whether only this machine can reach `host`. Errors: as addresses()."""
    return all(_is_loopback(ipaddress.ip_address(address)) for address in addresses(host, flag))


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def check_can_listen(flag: str, host: str, port: int) -> None:
    """Makes sure that nobody listens on host:port and that this process may.

    flag: the name of the port's option, for the message.
    Errors: StartupError.
    """
    for family, address in _resolve(host, port, flag):
        try:
            _try_listen(family, address)
        except OSError as error:
            raise StartupError(f"{flag} {join_host_port(host, port)}: {_how_to_mend(error)}") from None


def _try_listen(family: socket.AddressFamily, address: tuple[str, int]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)
        probe.listen(1)


def _how_to_mend(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "the port is in use; stop what listens there, or choose another one (0 takes a free one)"
        case errno.EACCES:
            return "this user may not listen there; choose a port above 1023"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address; use one of its own, 127.0.0.1 or 0.0.0.0"
        case _:
            return f"cannot listen there: {error.strerror or error}"


def _resolve(host: str, port: int, what: str) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    try:
        if not host:
            raise OSError("it is empty")  # which getaddrinfo takes for all addresses
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"{what}: {host!r} is no address of this machine ({error}); use an IP address"
        ) from None
    return [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]
