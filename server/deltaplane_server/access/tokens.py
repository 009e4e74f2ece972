"""Bearer tokens (RFC 6750): the file that lists them, and whether a call brings one."""

import hashlib
import hmac
import re
from collections.abc import Iterable

from deltaplane_controlplane.errors import UnauthenticatedError
from deltaplane_server.access.followed_files import FlaggedFile
from deltaplane_server.startup import StartupError

AUTHORIZATION = "authorization"

MIN_LENGTH, MAX_LENGTH = 16, 512
MAX_TOKENS = 1024

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class Tokens:
    """The tokens that are accepted, kept as SHA-256."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = tuple(dict.fromkeys(_digest(token) for token in tokens))

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, token: str) -> bool:
        """Takes as long whichever it is, and as long for any other."""
        digest = _digest(token)
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        return is_known

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> UnauthenticatedError | None:
        """Why a call with this metadata is refused; None where it brings one of the tokens."""
        found = [value for key, value in metadata if key == AUTHORIZATION]
        if not found:
            return UnauthenticatedError(
                "the call brings no token: send the metadata `authorization: Bearer TOKEN`",
                reason="TOKEN_MISSING",
            )
        scheme, _, token = str(found[0]).partition(" ")
        if len(found) > 1 or scheme.lower() != "bearer" or token.strip() not in self:
            return UnauthenticatedError(
                "the call's `authorization` is not `Bearer` and a token that is accepted here",
                reason="TOKEN_NOT_ACCEPTED",
            )
        return None


def parse_tokens(file: FlaggedFile, data: bytes) -> Tokens:
    """The tokens of a file: one a line, with what follows a # as a comment. Errors: StartupError, which names
    the line and shows nothing of it."""
    tokens = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        token = line.partition("#")[0].strip()
        if not token:
            continue
        if not MIN_LENGTH <= len(token) <= MAX_LENGTH or not _TOKEN.fullmatch(token):
            raise StartupError(
                f"{file}: line {number} is no token, which is {MIN_LENGTH} to {MAX_LENGTH} characters of "
                "A-Z, a-z, 0-9 and -._~+/, such as `openssl rand -hex 32` makes"
            )
        tokens.append(token)
    if not tokens:
        raise StartupError(f"{file}: there is no token in it; write one on a line")
    if len(tokens) > MAX_TOKENS:
        raise StartupError(f"{file}: it has {len(tokens)} tokens; at most {MAX_TOKENS} are taken")
    return Tokens(tokens)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
