"""The blocking client of the control plane."""

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc

from deltaplane import adapter_requests
from deltaplane.adapter_files import upload_header, upload_requests
from deltaplane.adapter_requests import Tier
from deltaplane.blocking.calls import Plane, Stream
from deltaplane.blocking.operations import OperationClient
from deltaplane.channel import DEFAULT_ADMIN_ADDRESS, ChannelConfig
from deltaplane.retry import RetryPolicy
from deltaplane.v1 import adapters_pb2, adapters_pb2_grpc
from deltaplane.v1.adapters_pb2 import Adapter, Capacity, Slot, WatchAdaptersResponse

_Change = TypeVar(
    "_Change",
    adapters_pb2.RegisterAdapterRequest,
    adapters_pb2.UpdateAdapterRequest,
    adapters_pb2.DeleteAdapterRequest,
    adapters_pb2.EvictAdapterRequest,
    adapters_pb2.RollbackAdapterRequest,
)


class AdapterClient:
    """Administers a server's adapters and blocks; `Client.adapters` is one. Threads may share it.

    operations: the calls that were told to return immediately, and others that take their time.

    Every call takes a `timeout` in seconds, over all its tries, and raises deltaplane.errors.DeltaplaneError.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADMIN_ADDRESS,
        *,
        retry: RetryPolicy | None = None,
        channel: ChannelConfig | None = None,
    ) -> None:
        self._plane = Plane(address, channel or ChannelConfig(), retry)
        self._stub = adapters_pb2_grpc.AdapterServiceStub(self._plane.channel)
        self.operations = OperationClient(self._plane)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls and closes the channel."""
        self._plane.channel.close()

    def register(
        self,
        name: str,
        source: str,
        *,
        labels: Mapping[str, str] | None = None,
        load_tier: Tier | None = None,
        expected_digest: str = "",
        validate_only: bool = False,
        idempotency_key: str = "",
        return_immediately: bool = False,
        timeout: float | None = None,
    ) -> Adapter:
        """Makes a PEFT adapter known under a name.

        source: a folder, as the server sees it, under one of its allowed roots; or where the server is to
            fetch it from, such as "hf://organisation/name@revision", "https://..." or "s3://bucket/prefix".
        load_tier: where to bring it at once; nowhere by default.
        expected_digest: refuse the files unless their SHA-256 is this.
        validate_only: check everything and change nothing.
        idempotency_key: a UUID; the same call sent again within ten minutes gets the first one's answer.
        return_immediately: do not wait for a fetch. The answer's `operation` is what `operations` tells of.
        """
        request = adapter_requests.register_adapter(
            name,
            source,
            labels=labels,
            load_tier=load_tier,
            expected_digest=expected_digest,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
            return_immediately=return_immediately,
        )
        return self._change(self._stub.RegisterAdapter, request, timeout)

    def upload(
        self,
        name: str,
        folder: str | os.PathLike[str],
        *,
        labels: Mapping[str, str] | None = None,
        replace: bool = False,
        etag: str = "",
        keep_previous: bool = False,
        load_tier: Tier | None = None,
        validate_only: bool = False,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> Adapter:
        """Sends a PEFT folder of this machine to the server and makes it known under a name. The server keeps
        the files as long as a version needs them.

        folder: has adapter_config.json and adapter_model.safetensors.
        replace: give these files to the adapter of this name, as update() does; its labels stay where none
            are given. With it, `etag` and `keep_previous` are as in update().
        The rest as in register().
        """
        header = upload_header(
            name,
            folder,
            labels=labels,
            replace=replace,
            etag=etag,
            keep_previous=keep_previous,
            load_tier=load_tier,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
        )
        return self._plane.upload(
            self._stub.UploadAdapter, lambda: upload_requests(header, folder), timeout=timeout
        )

    def get(self, name: str, *, timeout: float | None = None) -> Adapter:
        """One adapter."""
        request = adapters_pb2.GetAdapterRequest(name=name)
        return self._plane.unary(self._stub.GetAdapter, request, timeout=timeout, idempotent=True)

    def list(
        self, filter: str = "", *, page_size: int = 0, timeout: float | None = None
    ) -> Iterator[Adapter]:
        """All adapters by name, fetched page by page; `timeout` holds for each page.

        filter: terms joined by AND, such as "state=RESIDENT AND labels.team=search".
        page_size: at most 1000; 0 leaves it to the server.
        """
        request = adapters_pb2.ListAdaptersRequest(filter=filter, page_size=page_size)
        while True:
            page = self._plane.unary(self._stub.ListAdapters, request, timeout=timeout, idempotent=True)
            yield from page.adapters
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def update(
        self,
        name: str,
        *,
        source: str | None = None,
        labels: Mapping[str, str] | None = None,
        etag: str = "",
        expected_digest: str = "",
        validate_only: bool = False,
        keep_previous: bool = False,
        idempotency_key: str = "",
        return_immediately: bool = False,
        timeout: float | None = None,
    ) -> Adapter:
        """Gives an adapter new files, which become a new version, or new labels. What is None stays.

        etag: refuse unless the adapter's etag is this.
        keep_previous: keep the old version for rollback(); pin() with its number keeps its weights too.
        The rest as in register().
        """
        request = adapter_requests.update_adapter(
            name,
            source=source,
            labels=labels,
            etag=etag,
            expected_digest=expected_digest,
            validate_only=validate_only,
            keep_previous=keep_previous,
            idempotency_key=idempotency_key,
            return_immediately=return_immediately,
        )
        return self._change(self._stub.UpdateAdapter, request, timeout)

    def delete(
        self,
        name: str,
        *,
        etag: str = "",
        drain_timeout: float | None = None,
        force: bool = False,
        allow_missing: bool = False,
        validate_only: bool = False,
        wait_until_gone: bool = False,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> Adapter:
        """Forgets an adapter; new requests are refused at once.

        drain_timeout: seconds that streams under way may go on; the server's five minutes by default; 0
            aborts them at once.
        force: delete it even though it is pinned.
        allow_missing: a missing adapter is no error.
        wait_until_gone: answer when its last stream has ended. Else the answer's `operation` ends then.
        The rest as in register().
        """
        request = adapter_requests.delete_adapter(
            name,
            etag=etag,
            drain_timeout=drain_timeout,
            force=force,
            allow_missing=allow_missing,
            validate_only=validate_only,
            wait_until_gone=wait_until_gone,
            idempotency_key=idempotency_key,
        )
        return self._change(self._stub.DeleteAdapter, request, timeout)

    def load(
        self,
        name: str,
        tier: Tier = "device",
        *,
        version: int | None = None,
        return_immediately: bool = False,
        validate_only: bool = False,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> Adapter:
        """Brings an adapter's weights to a tier, and waits for it unless told to return immediately.

        version: one that is kept; the current one by default.
        """
        request = adapters_pb2.LoadAdapterRequest(
            name=name,
            tier=adapter_requests.tier(tier),
            version=version,
            return_immediately=return_immediately,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
        )
        return self._plane.unary(self._stub.LoadAdapter, request, timeout=timeout, idempotent=True)

    def evict(
        self,
        name: str,
        tier: Tier = "device",
        *,
        version: int | None = None,
        when_idle: bool = False,
        return_immediately: bool = False,
        validate_only: bool = False,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> Adapter:
        """Takes an adapter's weights out of a tier; out of "host" means out of both.

        version: one that is kept or drains; the current one by default.
        when_idle: wait until nothing uses it, instead of failing where something does.
        """
        request = adapters_pb2.EvictAdapterRequest(
            name=name,
            tier=adapter_requests.tier(tier),
            version=version,
            when_idle=when_idle,
            return_immediately=return_immediately,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
        )
        return self._change(self._stub.EvictAdapter, request, timeout)

    def pin(
        self,
        name: str,
        tier: Tier = "device",
        *,
        version: int | None = None,
        etag: str = "",
        return_immediately: bool = False,
        validate_only: bool = False,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> Adapter:
        """Brings an adapter to a tier and keeps it there. Each tier has a pin of its own; all slots but one
        may be pinned.

        version: one that is kept, to have it ready for rollback(); by default whichever is current.
        """
        request = adapters_pb2.PinAdapterRequest(
            name=name,
            tier=adapter_requests.tier(tier),
            version=version,
            etag=etag,
            return_immediately=return_immediately,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
        )
        return self._plane.unary(self._stub.PinAdapter, request, timeout=timeout, idempotent=not etag)

    def unpin(
        self,
        name: str,
        tier: Tier | None = None,
        *,
        version: int | None = None,
        etag: str = "",
        validate_only: bool = False,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> Adapter:
        """Lets a pinned adapter, or a version that is kept, be evicted again from a tier; from both by
        default."""
        request = adapters_pb2.UnpinAdapterRequest(
            name=name,
            tier=adapter_requests.tier(tier),
            version=version,
            etag=etag,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
        )
        return self._plane.unary(self._stub.UnpinAdapter, request, timeout=timeout, idempotent=not etag)

    def rollback(
        self,
        name: str,
        version: int | None = None,
        *,
        etag: str = "",
        validate_only: bool = False,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> Adapter:
        """Makes an earlier version that was kept the current one; the one before by default."""
        request = adapters_pb2.RollbackAdapterRequest(
            name=name,
            version=version,
            etag=etag,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
        )
        return self._change(self._stub.RollbackAdapter, request, timeout)

    def slots(self, *, timeout: float | None = None) -> Sequence[Slot]:
        """The device slots, free ones too, in order of slot."""
        request = adapters_pb2.ListSlotsRequest()
        return self._plane.unary(self._stub.ListSlots, request, timeout=timeout, idempotent=True).slots

    def capacity(self, ranks: Sequence[int] = (), *, timeout: float | None = None) -> Capacity:
        """What each tier holds, and how many more adapters of these ranks fit, with nothing but LoRA in the
        layers. One with DoRA takes what one rank more does, and one with biases what yet another does."""
        request = adapters_pb2.GetCapacityRequest(ranks=ranks)
        return self._plane.unary(self._stub.GetCapacity, request, timeout=timeout, idempotent=True)

    def watch(
        self, filter: str = "", *, resume_token: str = "", timeout: float | None = None
    ) -> Stream[WatchAdaptersResponse]:
        """The adapters as they are, then every change, without end.

        resume_token: that of the last event seen; goes on from there, without the snapshot.
        """
        request = adapters_pb2.WatchAdaptersRequest(filter=filter, resume_token=resume_token)
        return self._plane.stream(self._stub.WatchAdapters, request, timeout=timeout)

    def is_serving(self, *, timeout: float | None = None) -> bool:
        """Whether the control plane takes requests."""
        return self._plane.is_serving(timeout)

    def _change(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Change, Adapter]",
        request: _Change,
        timeout: float | None,
    ) -> Adapter:
        """A change that has an idempotency key may be sent again when nobody knows if the server saw it."""
        key = request.idempotency_key
        return self._plane.unary(method, request, timeout=timeout, idempotent=bool(key))
