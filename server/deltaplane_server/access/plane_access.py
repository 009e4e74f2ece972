"""Who may call a plane, and how: TLS, client certificates, tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from deltaplane_server.access.certificates import Identity, IdentityFiles
from deltaplane_server.access.followed_files import FlaggedFile, FollowedFiles
from deltaplane_server.access.interceptor import TokenInterceptor
from deltaplane_server.access.tokens import Tokens, parse_tokens
from deltaplane_server.config import ServerConfig
from deltaplane_server.startup import StartupError

_LOOK_EVERY_S = 1.0
"""How long a change of a file may go unseen."""

log = structlog.get_logger(__name__)


class PlaneAccess:
    """The files that guard one plane, and what gRPC needs of them.

    Without any, the plane is open and in plain text.
    """

    def __init__(
        self,
        identity: FollowedFiles[Identity] | None = None,
        tokens: FollowedFiles[Tokens] | None = None,
    ) -> None:
        self._identity = identity
        self._tokens = tokens

    @property
    def has_tls(self) -> bool:
        return self._identity is not None

    @property
    def has_tokens(self) -> bool:
        return self._tokens is not None

    @property
    def knows_callers(self) -> bool:
        """Whether a caller must show who it is, by a token or by a certificate."""
        return self.has_tokens or (
            self._identity is not None and self._identity.value.client_roots is not None
        )

    @property
    def certificate_expires(self) -> float:
        """When, in seconds since the epoch; 0 without TLS."""
        return 0.0 if self._identity is None else self._identity.value.expires

    def interceptors(self, on_refused: Callable[[str], object]) -> list[grpc.aio.ServerInterceptor]:
        """Those that come first. on_refused: see TokenInterceptor."""
        tokens = self._tokens
        return [] if tokens is None else [TokenInterceptor(lambda: tokens.value, on_refused)]

    def credentials(self) -> grpc.ServerCredentials | None:
        """For one port, which shows the certificate that is in force when a connection begins. None is plain
        text."""
        if self._identity is None:
            return None
        newest = _Newest(self._identity)
        return grpc.dynamic_ssl_server_credentials(
            newest.identity.configuration(),
            newest.configuration_if_new,  # type: ignore[arg-type]  # the stubs know no None
            require_client_authentication=newest.identity.client_roots is not None,
        )

    @property
    def has_files(self) -> bool:
        return self.has_tls or self.has_tokens

    def refresh(self) -> None:
        """Reads again what has changed: not for an event loop."""
        for files in (self._identity, self._tokens):
            if files is not None:
                files.refresh()


class _Newest:
    """What gRPC asks at each handshake, on a thread of its own: it wants to hear only of what it has not."""

    def __init__(self, files: FollowedFiles[Identity]) -> None:
        self._files = files
        self.identity = files.value

    def configuration_if_new(self) -> grpc.ServerCertificateConfiguration | None:
        identity = self._files.value
        if identity is self.identity:
            return None
        self.identity = identity
        return identity.configuration()


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call either plane."""

    data_plane: PlaneAccess
    control_plane: PlaneAccess

    @classmethod
    def of(cls, config: ServerConfig) -> "Access":
        """Reads the files of a configuration. Errors: StartupError, where one cannot be used."""
        client_ca = _file("--tls-client-ca-file", config.tls_client_ca_file)
        admin_ca = _file("--admin-tls-client-ca-file", config.admin_tls_client_ca_file)
        return cls(
            PlaneAccess(_identity(config, client_ca), _tokens("--api-token-file", config.api_token_file)),
            PlaneAccess(
                _identity(config, admin_ca or client_ca),
                _tokens("--admin-token-file", config.admin_token_file),
            ),
        )

    async def follow(self) -> None:
        """Takes over what changes in the files, until it is cancelled; returns where there are none."""
        planes = [plane for plane in (self.data_plane, self.control_plane) if plane.has_files]
        while planes:
            await asyncio.sleep(_LOOK_EVERY_S)
            for plane in planes:
                try:
                    await asyncio.to_thread(plane.refresh)
                except Exception:  # else nothing would be looked at any more
                    log.exception("access.refresh_failed")


def _identity(config: ServerConfig, client_ca: FlaggedFile | None) -> FollowedFiles[Identity] | None:
    certificate = _file("--tls-cert-file", config.tls_cert_file)
    key = _file("--tls-key-file", config.tls_key_file)
    if certificate is None or key is None:
        for file in (certificate, key, client_ca):
            if file is not None:
                raise StartupError(f"{file}: TLS takes a certificate and its key, and one of them is missing")
        return None
    files = IdentityFiles(certificate, key, client_ca)
    return FollowedFiles(files.all, files.parse)


def _tokens(flag: str, path: Path | None) -> FollowedFiles[Tokens] | None:
    file = _file(flag, path)
    return None if file is None else FollowedFiles([file], lambda contents: parse_tokens(file, contents[0]))


def _file(flag: str, path: Path | None) -> FlaggedFile | None:
    return None if path is None else FlaggedFile(flag, path)
