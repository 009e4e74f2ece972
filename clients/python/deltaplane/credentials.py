"""What a client shows to a server, and asks of it: TLS, certificates and tokens, from files."""

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc

from deltaplane.errors import InvalidArgumentError

StrPath = str | os.PathLike[str]

_MAX_FILE_BYTES = 1 << 20


def tls_credentials(
    ca_file: StrPath | None = None, cert_file: StrPath | None = None, key_file: StrPath | None = None
) -> grpc.ChannelCredentials:
    """TLS for ChannelConfig.credentials, from files in PEM.

    ca_file: the authorities of the server's certificate; gRPC's own, which are Mozilla's, by default.
    cert_file, key_file: the client's certificate with its chain, and its key, for a server that asks for one.
    Errors: InvalidArgumentError (a file cannot be read or used).
    """
    if (cert_file is None) != (key_file is None):
        field = "key_file" if key_file is None else "cert_file"
        raise InvalidArgumentError.for_field(field, "is missing: a certificate and its key come together")
    roots = None if ca_file is None else _read("ca_file", ca_file)
    chain = None if cert_file is None else _read("cert_file", cert_file)
    key = None if key_file is None else _read("key_file", key_file)
    if roots is not None:
        _check_roots(roots, ca_file)
    if cert_file is not None and key_file is not None:
        _check_pair(cert_file, key_file)
    return grpc.ssl_channel_credentials(roots, key, chain)


def token_from_file(path: StrPath) -> Callable[[], str]:
    """For ChannelConfig.token: the file's token as it is at each call, so that it may be replaced.

    Errors, also of the calls: InvalidArgumentError (the file cannot be read, or is not one token).
    """

    def read() -> str:
        return checked_token(_read("token_file", path).decode("utf-8", "replace"))

    read()
    return read


def checked_token(token: str) -> str:
    """A token without the white space around it. Errors: InvalidArgumentError, which does not show it."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgumentError.for_field("token", "it is not one word of visible ASCII characters")
    return token


def _read(field: str, path: StrPath) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError.for_field(field, f"{path} cannot be read ({error.strerror})") from error
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidArgumentError.for_field(field, f"{path} has over {_MAX_FILE_BYTES} bytes")
    return data


def _check_roots(roots: bytes, path: StrPath | None) -> None:
    """gRPC would only say that no server can be reached."""
    text = roots.decode("ascii", "ignore")  # comments may be in anything
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError.for_field("ca_file", f"{path} holds no certificate in PEM") from error


def _check_pair(cert_file: StrPath, key_file: StrPath) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert_file, key_file, password=str)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError.for_field(
            "key_file",
            f"{key_file} is not the key, in PEM and not encrypted, of a certificate in {cert_file}",
        ) from error
