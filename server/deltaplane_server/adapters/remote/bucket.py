"""Buckets of S3, and of what speaks like it."""

import asyncio
import threading
from typing import Any

from deltaplane_controlplane.errors import FailedPreconditionError
from deltaplane_server.adapters.remote.addresses import Address
from deltaplane_server.adapters.remote.host import FileBounds, RemoteAdapter
from deltaplane_server.adapters.remote.transfer import FileRequest

_SIGNED_FOR_S = 3600


class BucketHost:
    """S3 as the AWS tools are set up for: credentials, region, profile and endpoint (AWS_ENDPOINT_URL_S3) are
    found in their usual places. Objects are asked for by signed URLs, which lead nowhere else.
    """

    def __init__(self, bounds: FileBounds) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._client: Any = None

    async def resolve(self, address: Address) -> RemoteAdapter:
        return RemoteAdapter(
            source=str(address),
            files=self._bounds.files(
                shown=lambda name: f"{address}/{name}",
                locate=lambda name: asyncio.to_thread(self._sign, address, name),
                redirect=lambda target: None,
            ),
        )

    def _sign(self, address: Address, name: str) -> FileRequest:
        check_installed()
        from botocore.exceptions import BotoCoreError

        target = {"Bucket": address.authority, "Key": "/".join((*address.path, name))}
        try:
            with self._lock:
                self._client = self._client or _make_client()
            url = self._client.generate_presigned_url("get_object", Params=target, ExpiresIn=_SIGNED_FOR_S)
        except BotoCoreError as error:
            raise FailedPreconditionError(
                f"{address}: no request to S3 can be signed ({type(error).__name__}); check the credentials "
                "and the region in this server's environment",
                reason="SOURCE_NOT_READABLE",
            ) from None
        return FileRequest(url, {})


def check_installed() -> None:
    """Errors: FailedPreconditionError where what s3:// needs is not installed."""
    try:
        import botocore.session  # noqa: F401
    except ModuleNotFoundError:
        raise FailedPreconditionError(
            "s3:// needs a package more: pip install 'deltaplane[s3]'", reason="SOURCE_NOT_READABLE"
        ) from None


def _make_client() -> Any:
    import botocore.config
    import botocore.session

    config = botocore.config.Config(signature_version="s3v4")
    return botocore.session.get_session().create_client("s3", config=config)
