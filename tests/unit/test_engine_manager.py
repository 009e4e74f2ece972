"""The engine and the real adapter manager together, over fakes: who gets which weights, and when."""

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.errors import FailedPreconditionError, NotFoundError
from deltaplane_controlplane.leases import Lease
from deltaplane_server.engine.api import FinishReason, GenerationRequest, OutputDelta
from deltaplane_server.engine.engine import Engine
from deltaplane_server.scheduling.lease import AdapterUid
from deltaplane_server.scheduling.plan import NO_SLOT, ScheduledSequence
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from fake_runner import Clock, FakeRunner, LetterDecoder, expected_tokens

PROMPT = [1, 2, 3]
NAMES = "abcdef"


class PoolRunner(FakeRunner):
    """Checks that a slot holds the weights of its sequence's version, by their digest."""

    def __init__(self, config: SchedulerConfig, plane: ControlPlane) -> None:
        super().__init__(config)
        self._plane = plane

    def _check_slot(self, part: ScheduledSequence) -> None:
        super()._check_slot(part)
        lease = part.sequence.lease
        if part.slot != NO_SLOT:
            assert isinstance(lease, Lease)
            digests = {member.version.manifest.digest: member.weight for member in lease.members}
            assert self._plane.weights_of(part.slot) == digests


@dataclass
class Outputs:
    """All that a running engine made."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, FinishReason] = field(default_factory=dict)

    def deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish is not None:
                self.reasons[delta.request_id] = delta.finish.reason


@dataclass
class World:
    plane: ControlPlane
    engine: Engine
    scheduler: Scheduler
    outputs: Outputs
    uids: dict[str, AdapterUid] = field(default_factory=dict)

    def submit(self, request_id: str, adapters: str, max_tokens: int = 20) -> None:
        """adapters: a letter each; several are added up, the first one times two."""
        lease = None
        if len(adapters) == 1:
            lease = self.plane.manager.lease(adapters)
        elif adapters:
            lease = self.plane.manager.compose({**dict.fromkeys(adapters, 1.0), adapters[0]: 2.0})
        self.uids[request_id] = lease.uid if lease is not None else 0
        self.engine.submit(
            GenerationRequest(
                request_id=request_id,
                prompt_tokens=PROMPT,
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_tokens=max_tokens),
                lease=lease,
            )
        )

    def wait(self, *request_ids: str) -> None:
        eventually(lambda: set(request_ids) <= self.outputs.reasons.keys(), "the end of the requests")

    def check(self, request_id: str, max_tokens: int = 20) -> None:
        """The output is complete, and that of the version whose lease the request took."""
        assert self.outputs.reasons[request_id] is FinishReason.LENGTH
        assert self.outputs.tokens[request_id] == expected_tokens(self.uids[request_id], PROMPT, max_tokens)


@pytest.fixture
def world(plane: ControlPlane) -> Iterator[World]:
    """Two slots for six adapters."""
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=3000,
        num_pages=800,
        page_size=4,
        max_loras=2,
        enable_prefix_caching=True,
        ageing_s=0.05,
    )
    scheduler = Scheduler(config)
    engine = Engine(scheduler, PoolRunner(config, plane), LetterDecoder(), max_waiting=1000)
    plane.manager.set_hooks(
        on_ready=engine.wake, on_expel=engine.abort_adapter, on_gone=engine.forget_adapter
    )
    plane.add(*NAMES)
    world = World(plane, engine, scheduler, Outputs())
    engine.start(world.outputs.deliver)
    yield world
    engine.stop()
    scheduler.check_integrity()
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.kv.num_free == config.num_pages


def test_requests_for_more_adapters_than_slots(world: World) -> None:
    """Many requests for a cold adapter are one load."""
    ids = [f"{name}{number}" for name in ["", *NAMES] for number in range(8)]
    for request_id in ids:
        world.submit(request_id, request_id[:-1])
    world.wait(*ids)
    for request_id in ids:
        world.check(request_id)
    assert [world.plane.manager.get(name).loads for name in NAMES] == [1] * 6


def test_compositions_of_all_pairs_beside_their_adapters(world: World) -> None:
    """With two slots, and for each pair in either order."""
    pairs = [first + second for first in NAMES for second in NAMES if first != second]
    ids = [f"{who}{number}" for who in [*pairs, *NAMES] for number in range(3)]
    random.Random(1).shuffle(ids)
    for request_id in ids:
        world.submit(request_id, request_id[:-1])
    world.wait(*ids)
    for request_id in ids:
        world.check(request_id)


def test_a_composition_ends_on_the_versions_that_it_began_with(world: World) -> None:
    world.submit("old", "ab", max_tokens=1500)
    eventually(lambda: bool(world.outputs.tokens.get("old")))
    world.plane.manager.update("b", source=world.plane.folder("b", content="new files"))
    world.submit("new", "ab")
    world.wait("old", "new")
    world.check("old", max_tokens=1500)
    world.check("new")
    assert world.uids["old"] != world.uids["new"]


def test_a_drain_timeout_of_one_adapter_aborts_its_compositions(world: World) -> None:
    world.submit("stream", "ab", max_tokens=2900)
    eventually(lambda: bool(world.outputs.tokens.get("stream")))
    world.plane.manager.delete("b", drain_timeout_s=0.0)
    world.wait("stream")
    assert world.outputs.reasons["stream"] is FinishReason.ABORTED
    world.submit("other", "a")
    world.wait("other")
    world.check("other")


@pytest.mark.parametrize("late", ["c", "cd", "ac"])
def test_an_adapter_waits_for_a_slot_though_others_never_rest(world: World, late: str) -> None:
    """With two slots; also a composition, of which one adapter may be among those that never rest."""
    stop = threading.Event()

    def keep_busy(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            world.submit(f"{name}{number}", name, max_tokens=40)
            eventually(lambda: world.engine.stats().num_waiting < 4)

    threads = [threading.Thread(target=keep_busy, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: world.plane.resident() == {"a", "b"})
        world.submit("late", late)
        world.wait("late")
        world.check("late")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_an_adapter_that_is_closed_for_another_takes_no_room_from_it(plane: ControlPlane) -> None:
    """`c` needs all eight pages; the two others are closed, and are to go when they have ended."""
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, max_model_len=500, num_pages=200, page_size=4, max_loras=2
    )
    clock, outputs = Clock(), Outputs()
    scheduler = Scheduler(config, clock)
    engine = Engine(scheduler, PoolRunner(config, plane), LetterDecoder(), max_waiting=100)
    plane.manager.set_hooks(on_ready=engine.wake)
    plane.add("a")
    plane.add("b", rank=56)
    plane.add("c", rank=64)
    world = World(plane, engine, scheduler, outputs)

    def run(seconds: float) -> None:
        end = clock() + seconds
        while clock() < end:
            outputs.deliver(engine.step())
            plane.settle()
            clock.advance(0.02)

    world.submit("1", "a", max_tokens=60)
    world.submit("2", "b", max_tokens=400)
    run(0.1)
    world.submit("3", "c")
    run(3.0)
    assert outputs.reasons.keys() == {"1"}
    plane.manager.evict("a")
    world.submit("4", "a")
    run(8.0)
    assert list(outputs.reasons) == ["1", "2", "3", "4"]
    engine.check_integrity()


def test_streams_end_on_the_version_that_they_began_with(world: World) -> None:
    """The files change and are registered again while a stream runs."""
    world.submit("old", "a", max_tokens=1500)
    eventually(lambda: bool(world.outputs.tokens.get("old")))
    world.plane.manager.update("a", source=world.plane.folder("a", content="new files"))
    world.submit("new", "a")
    world.wait("old", "new")
    world.check("old", max_tokens=1500)
    world.check("new")
    assert world.uids["old"] != world.uids["new"]


def test_a_drain_timeout_aborts_the_streams_of_the_old_version(world: World) -> None:
    world.submit("stream", "a", max_tokens=2900)
    eventually(lambda: bool(world.outputs.tokens.get("stream")))
    world.plane.manager.delete("a", drain_timeout_s=0.0)
    world.wait("stream")
    assert world.outputs.reasons["stream"] is FinishReason.ABORTED
    tokens = world.outputs.tokens["stream"]
    assert tokens == expected_tokens(world.uids["stream"], PROMPT, len(tokens))


def test_requests_registrations_and_deletions_at_once(world: World) -> None:
    """Whatever happens around it, each output is that of one version."""
    ids: list[str] = []

    def request_some(seed: int) -> None:
        draw = random.Random(seed)
        for number in range(60):
            request_id = f"{seed}-{number}"
            try:
                world.submit(request_id, draw.choice(["", *NAMES, "ab", "cd", "ef", "ae"]))
            except (NotFoundError, FailedPreconditionError):
                continue
            ids.append(request_id)
            if draw.random() < 0.1:
                world.engine.abort(request_id)

    def administer() -> None:
        draw = random.Random(99)
        manager = world.plane.manager
        for number in range(40):
            name = draw.choice(NAMES)
            folder = world.plane.folder(name, content=f"files {number}")
            if draw.random() < 0.4:
                manager.delete(name)
                manager.register(name, folder)
            else:
                manager.update(name, source=folder)

    threads = [threading.Thread(target=request_some, args=(seed,)) for seed in range(4)]
    threads.append(threading.Thread(target=administer))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.wait(*ids)
    for request_id in ids:
        tokens = world.outputs.tokens[request_id]
        assert tokens == expected_tokens(world.uids[request_id], PROMPT, 20)[: len(tokens)]
    assert sum(reason is FinishReason.LENGTH for reason in world.outputs.reasons.values()) > 50
