"""A backend without tensors, for tests of a whole server."""

from typing import Any

from byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from deltaplane_server.backend import Backend, ModelFacts
from deltaplane_server.config import EngineConfig, ServerConfig
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from fake_runner import FakeRunner
from fakes import FakeLoader, FakePool

FACTS = ModelFacts(
    architecture="FakeForCausalLM",
    dtype="float32",
    device="cpu",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    num_layers=2,
    eos_token_ids=frozenset(),
)


class FakeBackend:
    """Called for a Backend, it answers one of the fakes that it shows."""

    def __init__(self, *, num_pages: int = 64) -> None:
        self.scheduler = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_pages=num_pages, max_loras=2
        )
        self.loader = FakeLoader()
        self.pool = FakePool(num_slots=2)
        self.runner = FakeRunner(self.scheduler)

    def __call__(self, config: EngineConfig) -> Backend:
        return Backend(
            facts=FACTS,
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=self.runner,
            loader=self.loader,
            pool=self.pool,
            scheduler=self.scheduler,
            memory={"weights": 1000, "kv_pages": 2000},
        )


def server_config(
    *, max_waiting: int = 1024, max_cpu_loras: int | None = None, **fields: Any
) -> ServerConfig:
    """A server on free ports of this machine that keeps nothing and waits for nobody."""
    engine = EngineConfig(
        model="fake",
        served_model_name="base",
        max_loras=2,
        max_lora_rank=16,
        max_cpu_loras=max_cpu_loras,
        max_waiting=max_waiting,
    )
    here: dict[str, Any] = {"host": "127.0.0.1", "http_host": "127.0.0.1", "drain_timeout_s": 0.0}
    ports = {"port": 0, "admin_port": 0, "http_port": 0}
    return ServerConfig(engine=engine, **{**here, **ports, **fields})
