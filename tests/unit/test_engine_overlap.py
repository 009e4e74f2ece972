"""Steps that are launched before the tokens of the one before them are read."""

from collections import defaultdict

import pytest
from structlog.testing import capture_logs

from deltaplane_server.engine.api import Finish, FinishReason, GenerationRequest
from deltaplane_server.engine.engine import Engine
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from fake_leases import FakeAdapters
from fake_runner import Clock, FakeRunner, LetterDecoder, expected_tokens, next_token

PROMPT = [1, 2, 3, 4, 5]


class World:
    """An engine whose runner has two steps under way, and what came out of it."""

    def __init__(self, *, num_pages: int = 100, num_slots: int = 2, caching: bool = False) -> None:
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=100,
            num_pages=num_pages,
            page_size=4,
            max_loras=num_slots,
            enable_prefix_caching=caching,
        )
        self.adapters = FakeAdapters(num_slots, load_ticks=0)
        self.runner = FakeRunner(config, self.adapters, max_steps_under_way=2)
        self.scheduler = Scheduler(config, Clock())
        self.engine = Engine(self.scheduler, self.runner, LetterDecoder(), max_waiting=100)
        self.adapters.wake = self.engine.wake
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finishes: dict[str, Finish] = {}

    def submit(
        self, name: str, *, prompt: list[int] | None = None, max_tokens: int = 8, uid: int = 0, stop: int = -1
    ) -> None:
        self.engine.submit(
            GenerationRequest(
                request_id=name,
                prompt_tokens=prompt or PROMPT,
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_tokens, stop_token_ids=frozenset({stop})),
                lease=self.adapters.lease(uid) if uid else None,
            )
        )

    def step(self) -> None:
        for delta in self.engine.step():
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish is not None:
                self.finishes[delta.request_id] = delta.finish
        self.engine.check_integrity()
        self.adapters.tick()

    def run(self) -> int:
        """Until nothing is left; returns how many steps were launched."""
        before = self.runner.num_steps
        for _ in range(300):
            self.step()
            if not self.engine.stats().num_running and not self.engine.stats().num_waiting:
                break
        self.step()
        stats = self.engine.stats()
        assert stats.kv_pages_free == stats.kv_pages_total
        assert self.runner.num_remembered == 0
        self.adapters.check_unused()
        return self.runner.num_steps - before


@pytest.fixture
def world() -> World:
    return World()


def test_a_step_is_launched_before_the_one_before_it_is_read(world: World) -> None:
    world.submit("a", max_tokens=3)
    launched, known = [], []
    for _ in range(5):
        world.step()
        launched.append(world.runner.num_steps)
        known.append(len(world.tokens["a"]))
    assert launched == [1, 2, 3, 3, 3]
    assert known == [0, 1, 2, 3, 3]
    assert world.tokens["a"] == expected_tokens(0, PROMPT, 3)


def test_no_step_is_spent_on_an_output_that_ends_at_its_length(world: World) -> None:
    world.submit("a", max_tokens=6)
    assert world.run() == 6
    assert world.finishes["a"].reason is FinishReason.LENGTH


def test_what_is_computed_beyond_a_stop_is_thrown_away(world: World) -> None:
    expected = expected_tokens(0, PROMPT, 8)
    world.submit("a", max_tokens=8, stop=expected[2])
    assert world.run() == 4, "one step is under way when the stop is read"
    assert world.tokens["a"] == expected[:3]
    assert world.finishes["a"].reason is FinishReason.STOP


def test_an_adapter_is_held_until_its_last_step_is_read() -> None:
    world = World(num_slots=1)
    world.submit("a", uid=1, stop=next_token(1, PROMPT))
    world.step()
    world.step()
    assert world.finishes["a"].reason is FinishReason.STOP
    world.submit("b", uid=2)
    assert world.adapters.occupant(0) == 1, "a step under way reads it"
    world.run()
    assert world.tokens["b"] == expected_tokens(2, PROMPT, 8)


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_sequences_go_on_as_if_nothing_had_happened(caching: bool) -> None:
    world = World(num_pages=9, caching=caching)
    prompts = {f"r{number}": [number] * 6 for number in range(4)}
    for name, prompt in prompts.items():
        world.submit(name, prompt=prompt, max_tokens=12, uid=1)
    world.run()
    for name, prompt in prompts.items():
        assert world.tokens[name] == expected_tokens(1, prompt, 12)


def test_a_page_is_found_by_others_only_when_its_tokens_are_known() -> None:
    """The fourth output token fills the second page: it may be looked up when that token has been read."""
    world = World(caching=True)
    expected = expected_tokens(0, PROMPT, 8)
    world.submit("a", max_tokens=8)
    for _ in range(5):
        world.step()
    assert len(world.tokens["a"]) == 4
    world.submit("b", prompt=PROMPT + expected[:4], max_tokens=4)
    world.run()
    assert world.tokens["a"] == expected
    assert world.tokens["b"] == expected[4:]
    assert world.engine.stats().prefix_cache_hits > 0


def test_an_abort_while_a_step_is_under_way(world: World) -> None:
    world.submit("a", uid=1)
    world.submit("b", uid=1)
    for _ in range(3):
        world.step()
    assert world.engine.abort("a")
    world.run()
    assert world.finishes["a"].reason is FinishReason.ABORTED
    assert world.tokens["a"] == expected_tokens(1, PROMPT, 8)[: len(world.tokens["a"])]
    assert world.tokens["b"] == expected_tokens(1, PROMPT, 8)


def test_a_step_that_fails_when_it_is_read_ends_its_sequences_alone(world: World) -> None:
    world.submit("a", max_tokens=20)
    for _ in range(3):
        world.step()
    world.runner.late_failures.append(RuntimeError("the device is broken"))
    world.step()  # launches the step that will fail
    world.submit("b", prompt=[7, 8, 9])
    with capture_logs() as logs:
        world.run()
    assert [entry["event"] for entry in logs] == ["step_failed"]
    assert world.finishes["a"].reason is FinishReason.ERROR
    assert world.tokens["b"] == expected_tokens(0, [7, 8, 9], 8)


def test_a_step_that_cannot_be_launched_ends_sequences_that_have_one_under_way(world: World) -> None:
    world.submit("a", uid=1)
    world.step()
    world.runner.failures.append(RuntimeError("the device is broken"))
    with capture_logs():
        world.run()
    assert world.finishes["a"].reason is FinishReason.ERROR
    assert world.tokens["a"] == []


def test_a_preempted_sequence_starts_again_when_its_last_step_is_read() -> None:
    world = World()
    world.submit("a")
    world.step()
    (sequence,) = world.scheduler.sequences()
    world.scheduler.preempt(sequence)
    assert not world.scheduler.schedule(), "it has a step under way"
    world.run()
    assert world.tokens["a"] == expected_tokens(0, PROMPT, 8)
