"""The certificate of a server: read from PEM files and checked before gRPC gets it."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc

from deltaplane_server.access.followed_files import FlaggedFile
from deltaplane_server.startup import StartupError, one_line

_HANDSHAKE_FLIGHTS = 4
"""A TLS handshake in memory is over after so many turns of both sides."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server shows to its clients, and asks of them. In PEM.

    client_roots: the authorities of client certificates, which are then required; None asks for none.
    expires: of the server's certificate, in seconds since the epoch.
    """

    certificate_chain: bytes
    private_key: bytes = field(repr=False)
    client_roots: bytes | None
    expires: float

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The same for gRPC."""
        return grpc.ssl_server_certificate_configuration(
            [(self.private_key, self.certificate_chain)], self.client_roots
        )


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """The files of an identity, each as its option names it. client_ca: None asks for no certificates."""

    certificate: FlaggedFile
    key: FlaggedFile
    client_ca: FlaggedFile | None

    @property
    def all(self) -> tuple[FlaggedFile, ...]:
        files = (self.certificate, self.key)
        return files if self.client_ca is None else (*files, self.client_ca)

    def parse(self, contents: Sequence[bytes]) -> Identity:
        """contents: of `all`. Errors: StartupError, where they cannot be used, or not now."""
        chain, key, *roots = contents
        if self.client_ca is not None:
            _check_authorities(self.client_ca, roots[0])
        return Identity(chain, key, roots[0] if roots else None, self._check_pair())

    def _check_pair(self) -> float:
        """Makes a handshake with the certificate and its key. Answers when the certificate expires."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        # The certificate itself is trusted, so that only its dates and its purpose are judged.
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            client.load_verify_locations(self.certificate.path)
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{self.certificate}: it holds no certificate in PEM ({_why(error)})"
            ) from None
        try:
            server.load_cert_chain(self.certificate.path, self.key.path, password=_no_password)
        except _EncryptedKeyError:
            raise StartupError(f"{self.key}: the key is encrypted; decrypt it with `openssl pkey`") from None
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{self.key}: it is not the key of {self.certificate} ({_why(error)}); "
                "give the two files that belong together"
            ) from None
        try:
            return _shake_hands(server, client)
        except ssl.SSLError as error:
            raise StartupError(f"{self.certificate}: it cannot be used ({_why(error)}); renew it") from None


class _EncryptedKeyError(Exception):
    pass


def _no_password() -> str:
    """Asked for where a key is encrypted; else OpenSSL would ask at the terminal."""
    raise _EncryptedKeyError


def _check_authorities(file: FlaggedFile, data: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=data.decode("ascii", "ignore"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{file}: it holds no certificate in PEM ({_why(error)})") from None
    authorities = context.get_ca_certs()
    if not authorities:
        raise StartupError(f"{file}: none of its certificates is an authority's (CA:TRUE)")
    ends = max(ssl.cert_time_to_seconds(str(one["notAfter"])) for one in authorities)
    if ends < datetime.now(UTC).timestamp():
        raise StartupError(f"{file}: all of its certificates have expired; renew them")


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """A handshake in memory. Answers when the server's certificate expires, in seconds since the epoch.

    Errors: ssl.SSLError.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_HANDSHAKE_FLIGHTS):
        for side in (client_side, server_side):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = client_side.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(certificate["notAfter"]))


def _why(error: Exception) -> str:
    """OpenSSL's own words, without its places in Python's source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return one_line(error)
