"""Folders of web servers."""

import base64
import netrc
import os
from functools import partial
from pathlib import Path

from deltaplane_server.adapters.remote.addresses import Address, AllowedSources, parse_redirect
from deltaplane_server.adapters.remote.host import FileBounds, RemoteAdapter
from deltaplane_server.adapters.remote.transfer import FileRequest


class WebHost:
    """Any allowed web server. It may send its client on to any other address that is allowed.

    Credentials, for Basic authentication, come from the .netrc of the server's user, or the file that NETRC
    names, as with curl.
    """

    def __init__(self, allowed: AllowedSources, bounds: FileBounds) -> None:
        self._allowed = allowed
        self._bounds = bounds

    async def resolve(self, address: Address) -> RemoteAdapter:
        return RemoteAdapter(
            source=str(address),
            files=self._bounds.files(
                shown=address.url, locate=partial(self._locate, address), redirect=self._redirect
            ),
        )

    async def _locate(self, address: Address, name: str) -> FileRequest:
        return FileRequest(address.url(name), _credentials(address))

    def _redirect(self, target: str) -> str | None:
        try:
            address, url = parse_redirect(target)
        except ValueError:
            return None
        return url if self._allowed.allow(address) else None


def _credentials(address: Address) -> dict[str, str]:
    path = os.environ.get("NETRC") or Path.home() / ".netrc"
    try:
        found = netrc.netrc(path).authenticators(address.host)
    except (OSError, netrc.NetrcParseError):
        return {}
    if found is None:
        return {}
    user, _, password = found
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {token}"}
