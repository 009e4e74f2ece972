"""Repositories of the Hugging Face hub."""

import asyncio
from functools import partial
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, loaded lazily

from deltaplane_controlplane.errors import FailedPreconditionError
from deltaplane_server.adapters.files import PICKLE_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.remote.addresses import Address, is_commit
from deltaplane_server.adapters.remote.host import FileBounds, RemoteAdapter
from deltaplane_server.adapters.remote.retries import RETRIED_STATUSES, TryAgainError
from deltaplane_server.adapters.remote.transfer import (
    FileRequest,
    connection_trouble,
    unreadable,
)
from deltaplane_server.version import VERSION

_TIMEOUT_S = 10.0


class HubHost:
    """The hub that HF_ENDPOINT names, asked with the token of HF_TOKEN or of `hf auth login`.

    A revision becomes its commit, so that a later fetch brings the same bytes. The hub sends its client on to
    the stores of its files, wherever they are; the token goes to the hub alone.
    """

    def __init__(self, bounds: FileBounds) -> None:
        self._bounds = bounds

    async def resolve(self, address: Address) -> RemoteAdapter:
        repository = "/".join(address.path)
        info = await asyncio.to_thread(_ask, repository, address.revision or constants.DEFAULT_REVISION)
        commit = info.sha or ""
        if not is_commit(commit):
            raise unreadable(f"{address}: the hub names no commit of it")
        _check_files(address, info)
        resolved = Address("hf", "", address.path, commit)
        return RemoteAdapter(
            source=str(resolved),
            files=self._bounds.files(
                shown=lambda name: f"{name} of {resolved}",
                locate=partial(_locate, repository, commit),
                redirect=_redirect,
            ),
        )


def _ask(repository: str, revision: str) -> ModelInfo:
    shown = f"hf://{repository}@{revision}"
    try:
        api = HfApi(library_name="deltaplane", library_version=VERSION)
        return api.model_info(repository, revision=revision, timeout=_TIMEOUT_S)
    except RevisionNotFoundError:
        raise unreadable(f"{shown}: the repository has no such revision") from None
    except RepositoryNotFoundError:
        raise unreadable(
            f"{shown}: the hub has no such repository, or shows it only to others than this server's token"
        ) from None
    except HFValidationError:
        raise unreadable(f"{shown}: that is no name of a repository") from None
    except OfflineModeIsEnabled:
        raise FailedPreconditionError(
            f"{shown}: this server is kept off the hub (HF_HUB_OFFLINE)", reason="SOURCE_NOT_READABLE"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in RETRIED_STATUSES:
            raise TryAgainError(f"the hub answers {status}") from None
        raise unreadable(f"{shown}: the hub answers {status}") from None
    except httpx2.TransportError as error:
        raise TryAgainError(connection_trouble(error)) from None
    except ValueError:
        raise TryAgainError("what answers is no hub") from None


def _check_files(address: Address, info: ModelInfo) -> None:
    names = {file.rfilename for file in info.siblings or ()}
    if WEIGHTS_FILE in names:
        return
    more = f"; {PICKLE_FILE} is a pickle, which may run code: convert it" if PICKLE_FILE in names else ""
    raise unreadable(f"{address} has no {WEIGHTS_FILE}{more}")


async def _locate(repository: str, commit: str, name: str) -> FileRequest:
    headers = await asyncio.to_thread(build_hf_headers, library_name="deltaplane", library_version=VERSION)
    return FileRequest(hf_hub_url(repository, name, revision=commit), headers)


def _redirect(target: str) -> str | None:
    """On to https; a hub without TLS may also lead about its own machine."""
    parts, hub = urlsplit(target), urlsplit(constants.ENDPOINT)
    is_near = (parts.scheme, parts.hostname) == (hub.scheme, hub.hostname)
    return target if parts.scheme == "https" or is_near else None
