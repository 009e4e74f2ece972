"""The asyncio client of the control plane's operations."""

import time
from collections.abc import AsyncIterator

from google.rpc import status_pb2

from deltaplane import adapter_requests
from deltaplane.aio.calls import Plane
from deltaplane.errors import DeadlineExceededError, from_status
from deltaplane.v1 import operations_pb2, operations_pb2_grpc
from deltaplane.v1.adapters_pb2 import Adapter
from deltaplane.v1.operations_pb2 import Operation

_SLICE_S = 30.0
"""How long one call of wait() asks the server to wait: proxies end calls that are silent for longer."""


class AsyncOperationClient:
    """Tells of calls that take their time; `AsyncAdapterClient.operations` is one.

    The server keeps operations in memory: after a restart there are none.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._stub = operations_pb2_grpc.OperationServiceStub(plane.channel)

    async def get(self, operation_id: str, *, timeout: float | None = None) -> Operation:
        """One operation."""
        request = operations_pb2.GetOperationRequest(id=operation_id)
        return await self._plane.unary(self._stub.GetOperation, request, timeout=timeout, idempotent=True)

    async def list(
        self, filter: str = "", *, page_size: int = 0, timeout: float | None = None
    ) -> AsyncIterator[Operation]:
        """All operations, the newest first, fetched page by page; `timeout` holds for each page.

        filter: terms joined by AND, such as "done=false AND kind=REGISTER AND adapter=name".
        page_size: at most 1000; 0 leaves it to the server.
        """
        request = operations_pb2.ListOperationsRequest(filter=filter, page_size=page_size)
        while True:
            page = await self._plane.unary(
                self._stub.ListOperations, request, timeout=timeout, idempotent=True
            )
            for operation in page.operations:
                yield operation
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def wait(self, operation_id: str, *, timeout: float | None = None) -> Adapter:
        """Waits for the end of an operation and answers the adapter, or raises what the call would have
        failed with. DeadlineExceededError leaves the operation under way."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_S if deadline is None else max(0.0, deadline - time.monotonic())
            request = adapter_requests.wait_operation(operation_id, min(left, _SLICE_S))
            operation = await self._plane.unary(
                self._stub.WaitOperation, request, timeout=min(left, _SLICE_S) + _SLICE_S, idempotent=True
            )
            if operation.HasField("error"):
                raise from_status(status_pb2.Status.FromString(operation.error.SerializeToString()))
            if operation.HasField("adapter_result"):
                return operation.adapter_result
            if left < _SLICE_S and deadline is not None:
                raise DeadlineExceededError(f"operation {operation_id} is still under way after {timeout} s")

    async def cancel(self, operation_id: str, *, timeout: float | None = None) -> Operation:
        """Asks an operation to end, and answers it as it is; what it already changed stays."""
        request = operations_pb2.CancelOperationRequest(id=operation_id)
        return await self._plane.unary(self._stub.CancelOperation, request, timeout=timeout, idempotent=True)
