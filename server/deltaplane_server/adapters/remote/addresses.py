"""Addresses of remote adapters, and which of them an operator allows.

    hf://org/name[@revision]        a repository of the Hugging Face hub
    https://host[:port]/path/       a folder of a web server; http:// on this machine alone
    s3://bucket/prefix/             objects of one prefix

An address is taken apart once, strictly, and only what was taken apart is compared and requested: what is
allowed and what is fetched cannot differ by the way in which two parsers read the same text.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from deltaplane_controlplane.errors import InvalidArgumentError

MAX_LENGTH = 2048

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9_]([A-Za-z0-9._/-]{0,198}[A-Za-z0-9_])?")
_HOST = re.compile(r"(?P<name>[A-Za-z0-9.-]+|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(:(?P<port>[0-9]{1,5}))?")
_HOST_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_BUCKET = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PORTS = {"https": 443, "http": 80}
_FORBIDDEN_IN_SEGMENTS = frozenset("/\\%;?#")
_KEPT_IN_SEGMENTS = "!$&'()*+,=:@~"


@dataclass(frozen=True, slots=True)
class Address:
    """Where an adapter is, or under which adapters are.

    authority: host and port, without the scheme's own; or a bucket; empty for the hub.
    path: decoded segments; for the hub organisation and name.
    revision: of the hub; empty where none is named.
    """

    scheme: str
    authority: str
    path: tuple[str, ...]
    revision: str = ""

    def lies_under(self, prefix: "Address") -> bool:
        """Whether all that the prefix names is the same here, by whole segments."""
        return (
            (self.scheme, self.authority) == (prefix.scheme, prefix.authority)
            and self.path[: len(prefix.path)] == prefix.path
            and prefix.revision in ("", self.revision)
        )

    @property
    def host(self) -> str:
        """Of the authority, without its port."""
        found = _HOST.fullmatch(self.authority)
        return found["ipv6"] or found["name"] if found is not None else ""

    def url(self, *names: str) -> str:
        """The address of a file below it, for the schemes of the web."""
        segments = (quote(segment, safe=_KEPT_IN_SEGMENTS) for segment in (*self.path, *names))
        return f"{self.scheme}://{self.authority}/{'/'.join(segments)}"

    def __str__(self) -> str:
        """The one way to write it."""
        if self.scheme in _PORTS:
            return self.url() + ("/" if self.path else "")
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.scheme}://{'/'.join(filter(None, (self.authority, *self.path)))}{revision}"


def is_remote(source: str) -> bool:
    """Whether this is an address, good or not, instead of the path of a folder."""
    return _SCHEME.match(source) is not None


def parse_address(text: str) -> Address:
    """The address of one adapter. Errors: ValueError, which says what is wrong with it."""
    address = _parse(text)
    if address.scheme == "hf" and len(address.path) != 2:
        raise ValueError("name a repository as hf://org/name or hf://org/name@revision")
    if address.scheme != "hf" and not address.path:
        raise ValueError("name the folder of the adapter")
    return address


def parse_prefix(text: str) -> Address:
    """What addresses may be allowed under. Errors: ValueError."""
    prefix = _parse(text)
    if prefix.scheme == "http" and not _is_loopback(prefix.host):
        raise ValueError("http:// is for this machine alone (127.0.0.1, [::1], localhost): use https://")
    return prefix


def parse_redirect(url: str) -> tuple[Address, str]:
    """Where a web server sends its client, as an address and the URL to request, which has its query.

    Errors: ValueError.
    """
    base, _, query = url.partition("#")[0].partition("?")
    if not query.isascii() or not query.isprintable() or " " in query:
        raise ValueError("its query has characters that none may have")
    address = _parse(base)
    if address.scheme not in _PORTS:
        raise ValueError("it leaves the web")
    return address, address.url() + (f"?{query}" if query else "")


class AllowedSources:
    """Which remote sources an operator allows: those under any of some prefixes."""

    def __init__(self, prefixes: Iterable[Address] = ()) -> None:
        self._prefixes = tuple(prefixes)

    def resolve(self, source: str) -> Address:
        """A source as an address. Errors: InvalidArgumentError (malformed, not allowed)."""
        try:
            address = parse_address(source)
        except ValueError as error:
            # Not told in full: it may hold credentials.
            raise InvalidArgumentError.for_field("source", f"no address of an adapter: {error}") from None
        if not self.allow(address):
            raise InvalidArgumentError.for_field(
                "source",
                f"{str(address)!r} is not an allowed source: remote adapters come from {self}",
                reason="SOURCE_NOT_ALLOWED",
            )
        return address

    def allow(self, address: Address) -> bool:
        return any(address.lies_under(prefix) for prefix in self._prefixes)

    def __str__(self) -> str:
        return ", ".join(map(str, self._prefixes)) or "nowhere: start the server with --adapter-sources"


def _parse(text: str) -> Address:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has {len(text)} characters, at most {MAX_LENGTH} are taken")
    if not text.isprintable() or "\\" in text:
        raise ValueError("it has characters that none may have")
    scheme, _, rest = text.partition("://")
    match scheme.lower():
        case "hf":
            return _parse_hub(rest)
        case "https" | "http" as web:
            return _parse_web(web, rest)
        case "s3":
            return _parse_bucket(rest)
    raise ValueError("adapters come from hf://, https:// and s3://")


def _parse_hub(rest: str) -> Address:
    place, at, revision = rest.partition("@")
    path = _segments(place)
    if len(path) > 2 or not all(_HUB_NAME.fullmatch(name) for name in path):
        raise ValueError("name a repository as hf://org/name or hf://org/name@revision")
    if at and (len(path) != 2 or not _REVISION.fullmatch(revision)):
        raise ValueError(f"{revision[:80]!r} is no branch, tag or commit of a repository")
    return Address("hf", "", path, revision)


def _parse_web(scheme: str, rest: str) -> Address:
    if "?" in rest or "#" in rest:
        raise ValueError("a query or a fragment does not name a folder")
    host, _, path = rest.partition("/")
    if "@" in host:
        raise ValueError("credentials do not belong into an address: give them to the server, in its .netrc")
    return Address(scheme, _authority(scheme, host), tuple(map(_decoded, _segments(path))))


def _parse_bucket(rest: str) -> Address:
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError("it names no bucket; write s3://bucket/prefix")
    path = _segments(prefix)
    for segment in path:
        _check_segment(segment)
    return Address("s3", bucket, path)


def _segments(path: str) -> tuple[str, ...]:
    """The parts of a path, with or without a slash at its end."""
    path = path.removesuffix("/")
    return tuple(path.split("/")) if path else ()


def _authority(scheme: str, text: str) -> str:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError("it has no host that can be read; write https://host/path/")
    name = match["name"].lower()
    if match["ipv6"]:
        name = f"[{ipaddress.IPv6Address(match['ipv6'])}]"
    elif not _HOST_NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no host name")
    port = int(match["port"] or _PORTS[scheme])
    if not 1 <= port <= 65535:
        raise ValueError(f"{port} is no port")
    return name if port == _PORTS[scheme] else f"{name}:{port}"


def _decoded(segment: str) -> str:
    """A segment of a URL's path without percent-encoding."""
    if _PERCENT.search(segment) or not segment.isascii():
        raise ValueError(f"{segment[:80]!r} is not percent-encoded as it must be")
    try:
        decoded = unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{segment[:80]!r} is not UTF-8") from None
    _check_segment(decoded)
    return decoded


def _check_segment(segment: str) -> None:
    bad = not segment.isprintable() or _FORBIDDEN_IN_SEGMENTS.intersection(segment)
    if bad or segment in ("", ".", ".."):
        raise ValueError(f"its path has the segment {segment[:80]!r}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_adapter(asked: str, known: str) -> bool:
    """Whether an adapter known to come from one address is what another asks for, as far as can be told
    without a network: where no commit is named, any commit is."""
    try:
        wanted, has = parse_address(asked), parse_address(known)
    except ValueError:
        return False
    if not is_commit(wanted.revision):
        wanted, has = (Address(a.scheme, a.authority, a.path) for a in (wanted, has))
    return wanted == has


def is_commit(revision: str) -> bool:
    """Whether this is the full name of a commit, which never means other files."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None
