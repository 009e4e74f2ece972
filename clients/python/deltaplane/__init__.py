"""deltaplane's client: streams from many LoRA adapters over one base model, and administers them.

    from deltaplane import Client

    with Client("localhost:50051") as client:
        print(client.generate_text("Once upon a time", adapter="creative-story", max_tokens=64))
        for slot in client.adapters.slots():
            print(slot.slot, slot.adapter)

Client blocks, AsyncClient is for asyncio; both have the same methods. Answers are the wire's own messages,
from deltaplane.v1. Errors are in deltaplane.errors.
"""

from deltaplane.adapter_requests import Tier
from deltaplane.aio.adapters import AsyncAdapterClient
from deltaplane.aio.calls import AsyncStream
from deltaplane.aio.client import AsyncClient
from deltaplane.aio.operations import AsyncOperationClient
from deltaplane.blocking.adapters import AdapterClient
from deltaplane.blocking.calls import Stream
from deltaplane.blocking.client import Client
from deltaplane.blocking.operations import OperationClient
from deltaplane.channel import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, ChannelConfig
from deltaplane.completion import Completion, Output
from deltaplane.credentials import tls_credentials, token_from_file
from deltaplane.errors import DeltaplaneError
from deltaplane.requests import GenerateOptions, Prompt
from deltaplane.retry import RetryPolicy

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_ADMIN_ADDRESS",
    "AdapterClient",
    "AsyncAdapterClient",
    "AsyncClient",
    "AsyncOperationClient",
    "AsyncStream",
    "ChannelConfig",
    "Client",
    "Completion",
    "DeltaplaneError",
    "GenerateOptions",
    "OperationClient",
    "Output",
    "Prompt",
    "RetryPolicy",
    "Stream",
    "Tier",
    "tls_credentials",
    "token_from_file",
]
