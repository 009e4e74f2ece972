"""The control plane's services over an adapter manager of fakes, on a real port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from control_plane import ControlPlane
from deltaplane.v1.adapters_pb2_grpc import add_AdapterServiceServicer_to_server
from deltaplane.v1.operations_pb2_grpc import add_OperationServiceServicer_to_server
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.interceptor import ErrorInterceptor
from deltaplane_controlplane.operation_service import OperationServicer
from deltaplane_controlplane.ports import ServerFigures
from deltaplane_controlplane.service import AdapterServicer
from deltaplane_controlplane.uploads import UploadLimits, Uploads

FIGURES = ServerFigures(kv_pages=100, free_kv_pages=40, kv_page_size=16, memory={"weights": 7, "kv_pages": 9})


@asynccontextmanager
async def serving_admin(plane: ControlPlane, folder: Path) -> AsyncIterator[str]:
    """Answers the address. Uploads go to a store below `folder`."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
    store = AdapterStore(folder / "uploads")
    uploads = Uploads(plane.manager, store, UploadLimits(1000, 1000))
    servicer = AdapterServicer(plane.manager, lambda: FIGURES, uploads)
    add_AdapterServiceServicer_to_server(servicer, server)
    add_OperationServiceServicer_to_server(OperationServicer(plane.manager.operations), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        servicer.close()
        store.close()
