"""What computes: the model, its memory, its adapters and its tokenizer. No tensor shows here."""

from collections.abc import Mapping
from dataclasses import dataclass

from deltaplane_controlplane.ports import AdapterLoader, DevicePool
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.engine.api import Runner
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The base model as it is served (see Model in generation.proto)."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything below the engine and the adapter manager.

    scheduler: the limits that the model and the device's memory set.
    memory: purpose to bytes, as they were handed out at start (see ServerFigures).
    """

    facts: ModelFacts
    tokenizer: Tokenizer
    runner: Runner
    loader: AdapterLoader
    pool: DevicePool
    scheduler: SchedulerConfig
    memory: Mapping[str, int]
