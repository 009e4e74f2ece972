"""AdapterService over the adapter manager."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import grpc

from deltaplane.v1 import adapters_pb2 as pb
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceServicer
from deltaplane_controlplane.conversion import (
    tier_argument,
    to_adapter,
    to_capacity,
    to_list,
    to_slot,
    to_watch,
    update_arguments,
)
from deltaplane_controlplane.errors import NotFoundError
from deltaplane_controlplane.long_calls import DEFAULT_DRAIN_TIMEOUT_S
from deltaplane_controlplane.manager import AdapterManager
from deltaplane_controlplane.operation import Operation
from deltaplane_controlplane.ports import ServerFiguresSource
from deltaplane_controlplane.uploads import ACCEPTED, Uploads
from deltaplane_controlplane.versions import Tier
from deltaplane_controlplane.watch import watch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]


class AdapterServicer(AdapterServiceServicer):
    """The control plane's handlers for a grpc.aio server with an ErrorInterceptor.

    What writes the catalogue runs on threads of the servicer's own, so that it never makes questions wait;
    what takes its time is an operation of the manager's, which has threads too.

    figures: what GetCapacity tells of KV pages and memory. uploads: taken over.
    """

    def __init__(
        self,
        manager: AdapterManager,
        figures: ServerFiguresSource,
        uploads: Uploads,
        *,
        num_threads: int = 16,
    ) -> None:
        self._manager = manager
        self._calls = manager.calls
        self._figures = figures
        self._uploads = uploads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-admin")

    def close(self) -> None:
        """Waits for changes under way; called after the gRPC server and the manager have stopped."""
        self._threads.shutdown(cancel_futures=True)
        self._uploads.close()

    async def RegisterAdapter(self, request: pb.RegisterAdapterRequest, context: _Context) -> pb.Adapter:
        operation = self._calls.register(
            request.name,
            request.source,
            labels=dict(request.labels),
            expected_digest=request.expected_digest,
            validate_only=request.validate_only,
            load_tier=tier_argument(request.load_tier, "load_tier"),
            idempotency_key=request.idempotency_key,
            is_shown=request.return_immediately,
        )
        return await self._answer(operation, request.return_immediately, request.source)

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: _Context) -> pb.Adapter:
        return to_adapter(self._manager.get(request.name))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: _Context
    ) -> pb.ListAdaptersResponse:
        # A large page takes milliseconds to put into a message as well.
        return await asyncio.to_thread(
            lambda: to_list(
                self._manager.list_adapters(
                    page_size=request.page_size, page_token=request.page_token, filter=request.filter
                )
            )
        )

    async def UpdateAdapter(self, request: pb.UpdateAdapterRequest, context: _Context) -> pb.Adapter:
        source, labels = update_arguments(request)
        operation = self._calls.update(
            request.adapter.name,
            source=source,
            labels=labels,
            etag=request.etag,
            expected_digest=request.expected_digest,
            validate_only=request.validate_only,
            keep_previous=request.keep_previous,
            idempotency_key=request.idempotency_key,
            is_shown=request.return_immediately,
        )
        return await self._answer(operation, request.return_immediately, source or "")

    async def DeleteAdapter(self, request: pb.DeleteAdapterRequest, context: _Context) -> pb.Adapter:
        timeout = request.drain_timeout
        try:
            view, operation = await self._change(
                self._calls.delete,
                request.name,
                etag=request.etag,
                drain_timeout_s=timeout.seconds + timeout.nanos / 1e9
                if request.HasField("drain_timeout")
                else DEFAULT_DRAIN_TIMEOUT_S,
                force=request.force,
                validate_only=request.validate_only,
                idempotency_key=request.idempotency_key,
            )
        except NotFoundError:
            if request.allow_missing:
                return pb.Adapter(name=request.name)
            raise
        if request.wait_until_gone and operation is not None:
            view = await asyncio.wrap_future(operation.end)
        return to_adapter(view)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: _Context) -> pb.Adapter:
        operation = self._calls.load(
            request.name,
            _tier(request.tier),
            version=_number(request),
            validate_only=request.validate_only,
            idempotency_key=request.idempotency_key,
        )
        return await self._answer(operation, request.return_immediately)

    async def EvictAdapter(self, request: pb.EvictAdapterRequest, context: _Context) -> pb.Adapter:
        operation = self._calls.evict(
            request.name,
            _tier(request.tier),
            when_idle=request.when_idle,
            version=_number(request),
            validate_only=request.validate_only,
            idempotency_key=request.idempotency_key,
        )
        return await self._answer(operation, request.return_immediately)

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: _Context) -> pb.Adapter:
        operation = await self._change(
            self._calls.pin,
            request.name,
            _tier(request.tier),
            at_once=request.return_immediately,
            version=_number(request),
            etag=request.etag,
            validate_only=request.validate_only,
            idempotency_key=request.idempotency_key,
        )
        return await self._answer(operation, request.return_immediately)

    async def UnpinAdapter(self, request: pb.UnpinAdapterRequest, context: _Context) -> pb.Adapter:
        view = await self._change(
            self._manager.unpin,
            request.name,
            tier_argument(request.tier),
            version=_number(request),
            etag=request.etag,
            validate_only=request.validate_only,
            idempotency_key=request.idempotency_key,
        )
        return to_adapter(view)

    async def RollbackAdapter(self, request: pb.RollbackAdapterRequest, context: _Context) -> pb.Adapter:
        view = await self._change(
            self._manager.rollback,
            request.name,
            version=_number(request),
            etag=request.etag,
            validate_only=request.validate_only,
            idempotency_key=request.idempotency_key,
        )
        return to_adapter(view)

    async def UploadAdapter(
        self, request_iterator: AsyncIterable[pb.UploadAdapterRequest], context: _Context
    ) -> pb.Adapter:
        async def accept() -> None:
            await context.send_initial_metadata((ACCEPTED,))

        return to_adapter(await self._uploads.receive(request_iterator, accept))

    async def ListSlots(self, request: pb.ListSlotsRequest, context: _Context) -> pb.ListSlotsResponse:
        return pb.ListSlotsResponse(slots=[to_slot(slot) for slot in self._manager.slots()])

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: _Context) -> pb.Capacity:
        return to_capacity(self._manager.capacity(request.ranks), self._figures())

    async def WatchAdapters(
        self, request: pb.WatchAdaptersRequest, context: _Context
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        items = watch(self._manager, request.filter, request.resume_token)
        async with aclosing(items):
            async for item in items:
                yield to_watch(item)

    async def _answer(self, operation: Operation, at_once: bool, source: str = "") -> pb.Adapter:
        """The adapter at the end of an operation, or `at_once` as it is. A caller who goes away leaves the
        operation, which is cancelled if nobody else waits for it."""
        if at_once:
            operation.keep()
            return to_adapter(self._calls.begun(operation, source))
        try:
            return to_adapter(await asyncio.wrap_future(operation.end))
        finally:
            operation.leave()

    async def _change(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs a change on a thread. A caller who goes away does not stop it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))


class _WithVersion(Protocol):
    """A request that may name a version."""

    version: int

    def HasField(self, field_name: Literal["version"]) -> bool: ...


def _number(request: _WithVersion) -> int | None:
    return request.version if request.HasField("version") else None


def _tier(tier: int) -> Tier:
    return tier_argument(tier) or Tier.DEVICE
