"""OperationService over the manager's book of operations."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from deltaplane.v1 import operations_pb2 as pb
from deltaplane.v1.operations_pb2_grpc import OperationServiceServicer
from deltaplane_controlplane.conversion import to_adapter, to_time
from deltaplane_controlplane.errors import DeltaplaneError, InvalidArgumentError
from deltaplane_controlplane.operation_views import OperationView
from deltaplane_controlplane.operations import Operations
from deltaplane_controlplane.status import to_status
from deltaplane_controlplane.views import AdapterView

_Context = grpc.aio.ServicerContext[Any, Any]


class OperationServicer(OperationServiceServicer):
    """The handlers for a grpc.aio server with an ErrorInterceptor. None of them blocks."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def GetOperation(self, request: pb.GetOperationRequest, context: _Context) -> pb.Operation:
        return to_operation(self._operations.get(request.id).view())

    async def ListOperations(
        self, request: pb.ListOperationsRequest, context: _Context
    ) -> pb.ListOperationsResponse:
        page = self._operations.list_operations(
            page_size=request.page_size, page_token=request.page_token, filter=request.filter
        )
        return pb.ListOperationsResponse(
            operations=[to_operation(view) for view in page.operations],
            next_page_token=page.next_page_token,
            total_size=page.total_size,
        )

    async def WaitOperation(self, request: pb.WaitOperationRequest, context: _Context) -> pb.Operation:
        timeout = request.timeout.ToTimedelta().total_seconds() if request.HasField("timeout") else None
        if timeout is not None and timeout < 0:
            raise InvalidArgumentError.for_field("timeout", f"{timeout:g} s is below 0")
        operation = self._operations.get(request.id)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        operation.end.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout)
        return to_operation(operation.view())

    async def CancelOperation(self, request: pb.CancelOperationRequest, context: _Context) -> pb.Operation:
        return to_operation(self._operations.cancel(request.id).view())


def to_operation(view: OperationView) -> pb.Operation:
    operation = pb.Operation(
        id=view.id,
        kind=pb.OperationKind.Value(f"OPERATION_KIND_{view.kind.name}"),
        adapter=view.adapter,
        state=pb.OperationState.Value(f"OPERATION_STATE_{view.state.name}"),
        progress=pb.OperationProgress(
            stage=view.stage, done_bytes=view.done_bytes, total_bytes=view.total_bytes
        ),
        create_time=to_time(view.create_time),
        end_time=to_time(view.end_time),
    )
    if isinstance(view.result, AdapterView):
        operation.adapter_result.CopyFrom(to_adapter(view.result))
    elif isinstance(view.result, DeltaplaneError):
        operation.error.ParseFromString(to_status(view.result).SerializeToString())
    return operation
