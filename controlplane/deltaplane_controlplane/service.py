"""AdapterService over the adapter manager."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

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
from deltaplane_controlplane.manager import DEFAULT_DRAIN_TIMEOUT_S, AdapterManager
from deltaplane_controlplane.ports import ServerFiguresSource
from deltaplane_controlplane.uploads import ACCEPTED, Uploads
from deltaplane_controlplane.versions import Tier
from deltaplane_controlplane.watch import watch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]


class AdapterServicer(AdapterServiceServicer):
    """The control plane's handlers for a grpc.aio server with an ErrorInterceptor.

    What reads files or writes the catalogue runs on threads of the servicer's own, so that it never makes
    questions wait.

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
        self._figures = figures
        self._uploads = uploads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-admin")

    def close(self) -> None:
        """Waits for changes under way; called after the gRPC server and the manager have stopped."""
        self._threads.shutdown(cancel_futures=True)
        self._uploads.close()

    async def RegisterAdapter(self, request: pb.RegisterAdapterRequest, context: _Context) -> pb.Adapter:
        view = await self._change(
            self._manager.register,
            request.name,
            request.source,
            labels=dict(request.labels),
            expected_digest=request.expected_digest,
            validate_only=request.validate_only,
            load_tier=tier_argument(request.load_tier, "load_tier"),
            idempotency_key=request.idempotency_key,
        )
        return to_adapter(view)

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
        view = await self._change(
            self._manager.update,
            request.adapter.name,
            source=source,
            labels=labels,
            etag=request.etag,
            expected_digest=request.expected_digest,
            validate_only=request.validate_only,
            keep_previous=request.keep_previous,
            idempotency_key=request.idempotency_key,
        )
        return to_adapter(view)

    async def DeleteAdapter(self, request: pb.DeleteAdapterRequest, context: _Context) -> pb.Adapter:
        timeout = request.drain_timeout
        view = await self._change(
            self._manager.delete,
            request.name,
            etag=request.etag,
            drain_timeout_s=timeout.seconds + timeout.nanos / 1e9
            if request.HasField("drain_timeout")
            else DEFAULT_DRAIN_TIMEOUT_S,
            force=request.force,
            allow_missing=request.allow_missing,
        )
        return to_adapter(view) if view is not None else pb.Adapter(name=request.name)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: _Context) -> pb.Adapter:
        arrival = self._manager.start_load(request.name, _tier(request.tier))
        if not request.return_immediately:
            await asyncio.wrap_future(arrival)
        return to_adapter(self._manager.get(request.name))

    async def EvictAdapter(self, request: pb.EvictAdapterRequest, context: _Context) -> pb.Adapter:
        return to_adapter(self._manager.evict(request.name, _tier(request.tier)))

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: _Context) -> pb.Adapter:
        view = await self._change(
            self._manager.pin, request.name, _tier(request.tier), wait=not request.return_immediately
        )
        return to_adapter(view)

    async def UnpinAdapter(self, request: pb.UnpinAdapterRequest, context: _Context) -> pb.Adapter:
        return to_adapter(await self._change(self._manager.unpin, request.name))

    async def RollbackAdapter(self, request: pb.RollbackAdapterRequest, context: _Context) -> pb.Adapter:
        version = request.version if request.HasField("version") else None
        view = await self._change(self._manager.rollback, request.name, version=version, etag=request.etag)
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
        async for item in watch(self._manager, request.filter, request.resume_token):
            yield to_watch(item)

    async def _change(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs a change on a thread. A caller who goes away does not stop it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))


def _tier(tier: int) -> Tier:
    return tier_argument(tier) or Tier.DEVICE
