"""A loaded model, its adapter manager and its engine in this process, without planes and network."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.manager import AdapterManager, ManagerConfig
from deltaplane_server.config import EngineConfig
from deltaplane_server.engine.api import FinishReason, GenerationRequest, OutputDelta, TokenLogprobs
from deltaplane_server.engine.engine import Engine
from deltaplane_server.loading import load_backend
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler

PATIENCE_S = 300.0


@dataclass(frozen=True)
class Ask:
    """A request.

    top: how many log-probabilities to report; None reports none.
    weights: of several adapters that are added up, in the place of `adapter`.
    """

    adapter: str
    prompt: Sequence[int]
    num_tokens: int
    top: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Answer:
    """Its tokens, their log-probabilities where they were asked for, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None


class InProcess:
    """Made by in_process(). manager, engine: the real ones."""

    def __init__(self, manager: AdapterManager, engine: Engine) -> None:
        self.manager = manager
        self.engine = engine
        self._answers: dict[str, Answer] = {}
        self._changed = threading.Condition()

    def ask_all(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at once; answers when all have ended, and raises where one ended before its time."""
        names = [str(number) for number in range(len(asks))]
        self._answers = {name: Answer() for name in names}
        for name, ask in zip(names, asks, strict=True):
            self.engine.submit(
                GenerationRequest(
                    request_id=name,
                    prompt_tokens=ask.prompt,
                    sampling=SamplingParams(temperature=ask.temperature, seed=ask.seed, logprobs=ask.top),
                    stop=StopParams(max_tokens=ask.num_tokens),
                    lease=self._lease(ask),
                )
            )
        answers = list(self._answers.values())
        with self._changed:
            done = self._changed.wait_for(lambda: all(answer.reason for answer in answers), PATIENCE_S)
        assert done, "some requests did not end"
        assert [answer.reason for answer in answers] == [FinishReason.LENGTH] * len(asks)
        return answers

    def _lease(self, ask: Ask) -> Lease | None:
        if ask.weights:
            return self.manager.compose(ask.weights)
        return self.manager.lease(ask.adapter) if ask.adapter else None

    def deliver(self, deltas: list[OutputDelta]) -> None:
        """On the engine's thread."""
        with self._changed:
            for delta in deltas:
                answer = self._answers[delta.request_id]
                answer.tokens += delta.token_ids
                answer.logprobs += delta.logprobs
                answer.reason = delta.finish.reason if delta.finish is not None else None
            self._changed.notify_all()


@contextmanager
def in_process(config: EngineConfig, model: Path, adapters: Mapping[str, Path]) -> Iterator[InProcess]:
    """Loads the model in the folder `model` and registers the adapters. Checks the books at the end."""
    backend = load_backend(config, model)
    manager = AdapterManager(
        loader=backend.loader,
        pool=backend.pool,
        config=ManagerConfig(config.max_lora_rank, config.max_cpu_loras_bytes),
        catalogue=Catalogue(":memory:"),
    )
    engine = Engine(
        Scheduler(backend.scheduler), backend.runner, backend.tokenizer, max_waiting=config.max_waiting
    )
    manager.set_hooks(on_ready=engine.wake, on_expel=engine.abort_adapter, on_gone=engine.forget_adapter)
    running = InProcess(manager, engine)
    try:
        for name, folder in adapters.items():
            manager.register_trusted(name, str(folder))
        manager.start()
        engine.start(running.deliver)
        yield running
        assert engine.is_alive
    finally:
        engine.stop()
        manager.close()
    engine.check_integrity()
    manager.check_integrity()
