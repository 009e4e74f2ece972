"""The engine: requests in, deltas out, and what happens when something goes wrong.

Most tests make the steps themselves; those of the thread say so.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from structlog.testing import capture_logs

from deltaplane_controlplane.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_server.engine.api import (
    AdapterUse,
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    SilentObserver,
    StepHandle,
    TokenDecoder,
    Usage,
)
from deltaplane_server.engine.engine import Engine
from deltaplane_server.scheduling.plan import StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from fake_leases import FakeAdapters, FakeLease
from fake_runner import Clock, FakeRunner, LetterDecoder, expected_tokens

STEP_S = 0.5
GREEDY = SamplingParams(temperature=0.0)


class Observer(SilentObserver):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.first_tokens: list[tuple[str, float]] = []
        self.gaps: list[float] = []
        self.preemptions = 0
        self.finishes: list[tuple[str, FinishReason]] = []

    def on_step(self, *, seconds: float, num_tokens: int, num_decodes: int, num_adapters: int) -> None:
        assert seconds >= 0
        self.steps.append((num_tokens, num_decodes, num_adapters))

    def on_first_token(self, *, adapter: str, seconds: float) -> None:
        self.first_tokens.append((adapter, seconds))

    def on_inter_token(self, *, seconds: float) -> None:
        self.gaps.append(seconds)

    def on_preemption(self) -> None:
        self.preemptions += 1

    def on_finish(self, *, request: GenerationRequest, usage: Usage, reason: FinishReason) -> None:
        self.finishes.append((request.request_id, reason))


class World:
    """An engine on a fake runner and fake adapters, and what came out of it."""

    def __init__(
        self,
        *,
        max_waiting: int = 100,
        num_pages: int = 200,
        num_slots: int = 2,
        load_ticks: int = 2,
        max_num_seqs: int = 8,
        decoder: TokenDecoder | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=200,
            num_pages=num_pages,
            page_size=4,
            max_loras=num_slots,
        )
        self.clock = Clock()
        self.adapters = FakeAdapters(num_slots, load_ticks=load_ticks)
        self.runner = FakeRunner(config, self.adapters)
        self.observer = Observer()
        self.scheduler = Scheduler(config, clock or self.clock)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            decoder or LetterDecoder(),
            max_waiting=max_waiting,
            observer=self.observer,
        )
        self.adapters.wake = self.engine.wake
        self.deltas: list[OutputDelta] = []

    def step(self, count: int = 1) -> list[OutputDelta]:
        """Makes steps; returns the deltas of the last one."""
        deltas: list[OutputDelta] = []
        for _ in range(count):
            deltas = self.engine.step()
            self.deltas += deltas
            self.engine.check_integrity()
            self.adapters.tick()
            self.clock.advance(STEP_S)
        return deltas

    def run(self) -> None:
        """Makes steps until all is done, and sees that nothing is left."""
        for _ in range(500):
            stats = self.engine.stats()
            if not stats.num_running and not stats.num_waiting:
                break
            self.step()
        self.check_unused()

    def check_unused(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.kv_pages_free == stats.kv_pages_total
        assert self.runner.num_remembered == 0
        self.adapters.check_unused()

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(d.text for d in self._of(request_id, index))

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for d in self._of(request_id, index) for token in d.token_ids]

    def finish(self, request_id: str, index: int = 0) -> Finish:
        """The finish of an output, which is on its last delta and on no other."""
        deltas = list(self._of(request_id, index))
        assert all(d.finish is None for d in deltas[:-1])
        finish = deltas[-1].finish
        assert finish is not None
        return finish

    def usage(self, request_id: str) -> Usage:
        """The usage of a request, which is on its last delta and on no other."""
        deltas = [d for d in self.deltas if d.request_id == request_id]
        assert all(d.usage is None for d in deltas[:-1])
        usage = deltas[-1].usage
        assert usage is not None
        return usage

    def _of(self, request_id: str, index: int) -> Iterator[OutputDelta]:
        return (d for d in self.deltas if (d.request_id, d.index) == (request_id, index))


def request(request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> GenerationRequest:
    """A greedy request of 5 tokens, apart from what `fields` say."""
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=prompt,
        **{"sampling": GREEDY, "stop": StopParams(max_tokens=5), **fields},
    )


def letters(tokens: Sequence[int]) -> str:
    return LetterDecoder().decode(tokens, skip_special_tokens=True)


# What comes out.


def test_a_request_is_streamed_token_by_token() -> None:
    world = World()
    world.engine.submit(request())
    world.run()
    expected = expected_tokens(0, [1, 2, 3], 5)
    assert [d.token_ids for d in world.deltas] == [(token,) for token in expected]
    assert [d.text for d in world.deltas] == list(letters(expected))
    assert world.finish("r") == Finish(FinishReason.LENGTH)
    assert world.usage("r").completion_tokens == 5


def test_deltas_of_a_step_come_together() -> None:
    world = World()
    for name in "abc":
        world.engine.submit(request(name))
    assert [d.request_id for d in world.step()] == ["a", "b", "c"]
    world.run()


def test_stream_interval_holds_tokens_together() -> None:
    """The first goes at once."""
    world = World()
    world.engine.submit(request(stream_interval=3, stop=StopParams(max_tokens=9)))
    world.run()
    assert [len(d.token_ids) for d in world.deltas] == [1, 3, 3, 2]
    assert world.text("r") == letters(expected_tokens(0, [1, 2, 3], 9))


def test_several_outputs_of_a_request() -> None:
    """Each has a sequence, a lease and a seed of its own; usage comes once, with the last to end."""
    world = World()
    lease = world.adapters.lease(1)
    sampling = SamplingParams(temperature=0.0, seed=2**64 - 1)
    world.engine.submit(request(lease=lease, num_outputs=3, sampling=sampling))
    assert world.adapters.num_leases == 3
    world.step(3)
    sequences = sorted(world.scheduler.sequences(), key=lambda s: s.index)
    assert [s.sampling.seed for s in sequences] == [2**64 - 1, 0, 1]
    world.run()
    for index in range(3):
        assert world.tokens("r", index) == expected_tokens(1, [1, 2, 3], 5)
        assert world.finish("r", index).reason is FinishReason.LENGTH
    assert world.usage("r").completion_tokens == 15


def test_logprobs_are_reported_where_asked_for() -> None:
    world = World()
    world.engine.submit(request("with", sampling=SamplingParams(temperature=0.0, logprobs=2)))
    world.engine.submit(request("without"))
    world.run()
    with_logprobs = [d for d in world.deltas if d.request_id == "with"]
    for delta in with_logprobs:
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
        assert all(entry.logprob == -0.5 and len(entry.top) == 2 for entry in delta.logprobs)
    assert all(not d.logprobs for d in world.deltas if d.request_id == "without")


def test_usage_tells_where_the_time_went() -> None:
    world = World(load_ticks=2)
    lease = world.adapters.lease(1)
    adapters = (AdapterUse("a", 7, hit=False),)
    world.engine.submit(request(lease=lease, adapters=adapters))
    world.run()
    usage = world.usage("r")
    assert usage == Usage(
        prompt_tokens=3,
        completion_tokens=5,
        cached_tokens=0,
        queue_ms=2 * STEP_S * 1000,
        prefill_ms=0,
        decode_ms=4 * STEP_S * 1000,
        adapters=adapters,
        adapter_load_ms=2 * STEP_S * 1000,
        preemptions=0,
    )


def test_the_observer_is_told() -> None:
    world = World(load_ticks=0)
    world.engine.submit(request("x", lease=world.adapters.lease(1), adapters=(AdapterUse("a", 1),)))
    world.engine.submit(request("y", prompt=[5]))
    world.run()
    observer = world.observer
    assert observer.steps == [(4, 1, 1), *[(2, 2, 1)] * 4]
    assert observer.first_tokens == [("", 0.0), ("a", 0.0)]
    assert observer.gaps == [STEP_S] * 8
    assert sorted(observer.finishes) == [("x", FinishReason.LENGTH), ("y", FinishReason.LENGTH)]


def test_preemptions_are_counted() -> None:
    world = World(num_pages=12)
    for name in "abc":
        world.engine.submit(request(name, stop=StopParams(max_tokens=30)))
    world.run()
    preemptions = [world.usage(name).preemptions for name in "abc"]
    assert preemptions[0] == 0
    assert sum(preemptions) == world.observer.preemptions > 0
    assert all(world.tokens(name) == expected_tokens(0, [1, 2, 3], 30) for name in "abc")


# How outputs end.


@pytest.mark.parametrize("kind", ["stop_token_ids", "eos_token_ids"])
def test_a_stop_token_ends_the_output_without_its_text(kind: str) -> None:
    world = World()
    expected = expected_tokens(0, [1, 2, 3], 20)
    ids: dict[str, Any] = {kind: frozenset([expected[3]])}
    world.engine.submit(request(stop=StopParams(max_tokens=20, **ids)))
    world.run()
    assert world.finish("r") == Finish(FinishReason.STOP, matched_token=expected[3])
    assert world.tokens("r") == expected[:4]
    assert world.text("r") == letters(expected[:3])


def test_min_tokens_come_before_any_stop() -> None:
    world = World()
    expected = expected_tokens(0, [1, 2, 3], 20)
    stops = letters(expected)
    for name, stop in {
        "token": StopParams(max_tokens=20, min_tokens=8, eos_token_ids=frozenset(expected)),
        "text": StopParams(max_tokens=20, min_tokens=8, stop=tuple(set(stops))),
    }.items():
        world.engine.submit(request(name, stop=stop))
    world.run()
    assert world.tokens("token") == world.tokens("text") == expected[:8]
    assert world.finish("token").matched_token == expected[7]
    assert world.text("text") == stops[:7]


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_ends_the_output(include_stop: bool) -> None:
    world = World()
    expected = expected_tokens(0, [1, 2, 3], 20)
    text = letters(expected)
    stop = StopParams(max_tokens=20, stop=(text[4:7],), include_stop=include_stop)
    world.engine.submit(request(stop=stop))
    world.run()
    assert world.finish("r") == Finish(FinishReason.STOP, matched_text=text[4:7])
    assert world.text("r") == text[: 7 if include_stop else 4]
    assert world.tokens("r") == expected[:7]


def test_text_held_back_for_a_stop_is_sent_at_the_end() -> None:
    world = World()
    text = letters(expected_tokens(0, [1, 2, 3], 5))
    world.engine.submit(request(stop=StopParams(max_tokens=5, stop=(text[3:] + "!",))))
    world.step(4)
    assert world.text("r") == text[:3]
    world.run()
    assert world.text("r") == text
    assert world.finish("r").reason is FinishReason.LENGTH


class PieceDecoder:
    """Tokens are pieces of text; byte-fallback ones are decoded in runs, as SentencePiece does."""

    def __init__(self, pieces: dict[int, str | int]) -> None:
        self._pieces: dict[int, str | int] = defaultdict(lambda: "?", pieces)
        self.byte_fallback_ids = frozenset(t for t, piece in pieces.items() if isinstance(piece, int))
        self.pieces: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text, run = "", b""
        for piece in [*(self._pieces[token] for token in token_ids), ""]:
            if isinstance(piece, int):
                run += bytes([piece])
                continue
            try:
                text += run.decode() + piece
            except UnicodeDecodeError:
                text += "\ufffd" * len(run) + piece
            run = b""
        return text


def test_a_stop_string_in_fallback_bytes_ends_the_output_at_once() -> None:
    """Though their text is not certain before the next token, it is if none follows."""
    a, newline, b = expected_tokens(0, [1, 2, 3], 3)
    world = World(decoder=PieceDecoder({a: "a", newline: 0x0A, b: "b"}))
    world.engine.submit(request(stop=StopParams(max_tokens=9, stop=("\n",))))
    world.run()
    assert world.tokens("r") == [a, newline]
    assert world.text("r") == "a"
    assert world.finish("r") == Finish(FinishReason.STOP, matched_text="\n")


def test_an_incomplete_character_is_no_stop() -> None:
    """Even of U+FFFD itself, which is what it would be if no byte followed."""
    tokens = expected_tokens(0, [1, 2, 3], 5)
    euro: dict[int, str | int] = dict(zip(tokens, "€".encode(), strict=False))
    world = World(decoder=PieceDecoder(euro))
    world.engine.submit(request(stop=StopParams(max_tokens=4, stop=("\ufffd",))))
    world.run()
    assert world.text("r") == "€?"


def test_an_incomplete_character_is_flushed() -> None:
    a, high, _ = expected_tokens(0, [1, 2, 3], 3)
    world = World(decoder=PieceDecoder({a: "a", high: 0xE2}))
    world.engine.submit(request("length", stop=StopParams(max_tokens=2)))
    world.engine.submit(request("aborted"))
    world.step(2)
    world.engine.abort("aborted")
    world.run()
    assert world.text("length") == world.text("aborted") == "a\ufffd"


# Refusals.


def test_what_can_never_fit_is_refused_and_its_lease_left_alone() -> None:
    world = World(num_pages=10)
    lease = world.adapters.lease(1)
    with pytest.raises(InvalidArgumentError, match="prompt"):
        world.engine.submit(request(prompt=[1] * 40, lease=lease))
    with pytest.raises(InvalidArgumentError, match="max_tokens"):
        world.engine.submit(request(prompt=[1] * 38, lease=lease))
    check_still_held(world, lease)


def test_an_id_in_flight_is_refused() -> None:
    world = World()
    world.engine.submit(request())
    lease = world.adapters.lease(1)
    with pytest.raises(AlreadyExistsError, match="'r' is in flight"):
        world.engine.submit(request(lease=lease, num_outputs=4))
    check_still_held(world, lease)
    world.run()
    world.engine.submit(request())
    world.run()


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    """Requests that have started do not count, those that were preempted neither."""
    world = World(max_waiting=2, max_num_seqs=1)
    for name in "ab":
        world.engine.submit(request(name, num_outputs=3))
    lease = world.adapters.lease(1)
    with pytest.raises(ResourceExhaustedError, match="2 requests wait") as caught:
        world.engine.submit(request("c", lease=lease))
    assert caught.value.retry_after_s > 0
    check_still_held(world, lease)
    world.step()
    world.engine.submit(request("c"))
    world.engine.abort("b")
    world.step()
    world.engine.submit(request("d"))
    world.run()


def test_a_draining_engine_refuses() -> None:
    world = World()
    world.engine.submit(request("running"))
    world.step(2)
    assert not world.engine.drain(0.0)
    lease = world.adapters.lease(1)
    with pytest.raises(UnavailableError, match="draining"):
        world.engine.submit(request("late", lease=lease))
    check_still_held(world, lease)
    world.step()
    assert world.finish("running").reason is FinishReason.ABORTED
    assert world.engine.drain(0.0)
    world.check_unused()


def check_still_held(world: World, lease: FakeLease) -> None:
    """The lease is the caller's, and the only one."""
    assert not lease.is_released
    assert world.adapters.num_leases == 1
    lease.release()


# Aborts.


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
def test_an_abort_takes_one_step(num_steps: int) -> None:
    """Before it was seen, while its adapter loads, in prefill and in decode."""
    world = World(load_ticks=2)
    prompt = [1] * 90
    lease = world.adapters.lease(1)
    world.engine.submit(request(prompt=prompt, lease=lease, num_outputs=2, stop=StopParams(max_tokens=50)))
    world.step(num_steps)
    assert world.engine.abort("r")
    deltas = world.step()
    assert [d.finish for d in deltas if d.finish] == [Finish(FinishReason.ABORTED)] * 2
    world.check_unused()
    assert not world.engine.abort("r")
    outputs = [world.tokens("r", index) for index in range(2)]
    assert all(tokens == expected_tokens(1, prompt, 50)[: len(tokens)] for tokens in outputs)
    assert world.usage("r").completion_tokens == sum(map(len, outputs))


def test_an_abort_does_not_disturb_others() -> None:
    world = World()
    world.engine.submit(request("a"))
    world.engine.submit(request("b"))
    world.step(2)
    world.engine.abort("a")
    world.run()
    assert world.tokens("b") == expected_tokens(0, [1, 2, 3], 5)


def test_an_abort_of_nothing() -> None:
    assert not World().engine.abort("nobody")


def test_an_abort_never_hits_a_later_request_of_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes during the last step of the first."""
    world = World()
    compute = world.runner.submit

    def compute_while_aborted(plan: StepPlan) -> StepHandle:
        assert world.engine.abort("r")
        return compute(plan)

    world.engine.submit(request(stop=StopParams(max_tokens=1)))
    with monkeypatch.context() as patch:
        patch.setattr(world.runner, "submit", compute_while_aborted)
        world.step()
    assert world.finish("r").reason is FinishReason.LENGTH
    world.deltas.clear()
    world.engine.submit(request())
    world.run()
    assert world.finish("r").reason is FinishReason.LENGTH
    assert world.usage("r").completion_tokens == 5


def test_all_requests_of_an_adapter_version_can_be_aborted() -> None:
    world = World()
    for name, uid in {"a": 1, "b": 2, "c": 1}.items():
        world.engine.submit(request(name, lease=world.adapters.lease(uid)))
    world.step(3)
    world.engine.abort_adapter(1)
    world.run()
    assert [world.finish(name).reason for name in "abc"] == [
        FinishReason.ABORTED,
        FinishReason.LENGTH,
        FinishReason.ABORTED,
    ]


# Failures.


def test_a_failing_step_fails_its_sequences_alone() -> None:
    world = World(max_num_seqs=2)
    for name in "abc":
        world.engine.submit(request(name))
    world.step()
    world.runner.failures = [RuntimeError("the device is broken")]
    with capture_logs() as logs:
        world.step()
    assert [(log["event"], log["log_level"]) for log in logs] == [("step_failed", "error")]
    for name in "ab":
        finish = world.finish(name)
        assert finish.reason is FinishReason.ERROR
        assert isinstance(finish.error, InternalError)
    world.run()
    assert world.tokens("c") == expected_tokens(0, [1, 2, 3], 5)


def test_a_failing_first_step_leaves_nothing_behind() -> None:
    world = World(max_waiting=1)
    world.runner.failures = [RuntimeError("the device is broken")]
    world.engine.submit(request("a"))
    with capture_logs():
        world.step()
    world.check_unused()
    world.engine.submit(request("b"))
    world.run()


def test_an_adapter_that_cannot_be_loaded_fails_its_requests() -> None:
    """With the manager's own error, and never with an answer of the base model."""
    world = World()
    world.adapters.failing.add(1)
    world.engine.submit(request("bad", lease=world.adapters.lease(1), num_outputs=2))
    world.engine.submit(request("good", lease=world.adapters.lease(2)))
    world.run()
    assert isinstance(world.finish("bad").error, FailedPreconditionError)
    assert world.tokens("bad") == world.tokens("bad", 1) == []
    assert world.tokens("good") == expected_tokens(2, [1, 2, 3], 5)


def test_a_fault_of_the_manager_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def activate(_: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(world.adapters, "activate", activate)
    world.engine.submit(request(lease=world.adapters.lease(1)))
    with capture_logs() as logs:
        world.run()
    assert isinstance(world.finish("r").error, InternalError)
    assert [log["event"] for log in logs] == ["adapter_activation_failed"]


def test_text_that_cannot_be_decoded_fails_its_request_alone() -> None:
    class Decoder(LetterDecoder):
        pieces: Mapping[int, str] = MappingProxyType({})

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            if expected[2] in token_ids:
                raise ValueError("no such token")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    expected = expected_tokens(0, [1, 2, 3], 5)
    world = World(decoder=Decoder())
    world.engine.submit(request("bad"))
    world.engine.submit(request("good", prompt=[9], stop=StopParams(max_tokens=2)))
    with capture_logs() as logs:
        world.run()
    assert [log["event"] for log in logs] == ["detokenization_failed"]
    assert isinstance(world.finish("bad").error, InternalError)
    assert world.finish("good").reason is FinishReason.LENGTH


def test_a_fork_that_fails_leaves_the_lease_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    lease = world.adapters.lease(1)
    make_fork = lease.fork

    def fork() -> FakeLease:
        if world.adapters.num_leases == 3:
            raise ZeroDivisionError
        return make_fork()

    monkeypatch.setattr(lease, "fork", fork)
    with pytest.raises(ZeroDivisionError):
        world.engine.submit(request(lease=lease, num_outputs=4))
    check_still_held(world, lease)


# The thread.


class Inbox:
    """Takes the deltas of a running engine."""

    def __init__(self) -> None:
        self.deltas: list[OutputDelta] = []
        self._changed = threading.Condition()

    def deliver(self, deltas: list[OutputDelta]) -> None:
        assert deltas
        with self._changed:
            self.deltas += deltas
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[list[OutputDelta]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.deltas), 30)

    def wait_for_end_of(self, *request_ids: str) -> None:
        self.wait_for(lambda deltas: set(request_ids) <= {d.request_id for d in deltas if d.usage})


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def running(inbox: Inbox) -> Iterator[World]:
    """A world whose engine has a thread, on which time stands still."""
    world = World(load_ticks=0)
    world.engine.start(inbox.deliver)
    yield world
    world.engine.stop()
    assert not world.engine.is_alive
    world.check_unused()


def test_the_thread_serves_requests_of_many_threads(running: World, inbox: Inbox) -> None:
    names = [f"r{number}" for number in range(40)]

    def submit(names: Sequence[str]) -> None:
        for name in names:
            uid = int(name[1:]) % 4
            lease = running.adapters.lease(uid) if uid else None
            running.engine.submit(request(name, lease=lease, stop=StopParams(max_tokens=20)))

    threads = [threading.Thread(target=submit, args=(names[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inbox.wait_for_end_of(*names)
    running.deltas = inbox.deltas
    for name in names:
        assert running.tokens(name) == expected_tokens(int(name[1:]) % 4, [1, 2, 3], 20)


def test_the_thread_sleeps_while_there_is_nothing_to_do(
    running: World, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = threading.Semaphore(0)
    step = running.engine.step

    def counting_step() -> list[OutputDelta]:
        steps.release()
        return step()

    monkeypatch.setattr(running.engine, "step", counting_step)
    running.engine.submit(request())
    inbox.wait_for_end_of("r")
    assert not all(steps.acquire(timeout=0.3) for _ in range(100)), "a busy loop"
    running.engine.wake()
    assert steps.acquire(timeout=30)


def test_a_load_that_ends_wakes_the_thread(running: World, inbox: Inbox) -> None:
    running.adapters.load_ticks = 1
    running.engine.submit(request(lease=running.adapters.lease(1)))
    wait_until(lambda: running.adapters.loads == [1])
    running.adapters.tick()
    inbox.wait_for_end_of("r")


def test_an_abort_wakes_the_thread(running: World, inbox: Inbox) -> None:
    running.adapters.load_ticks = 1_000_000
    running.engine.submit(request(lease=running.adapters.lease(1)))
    wait_until(lambda: running.adapters.loads == [1])
    assert running.engine.abort("r")
    inbox.wait_for_end_of("r")


def test_drain_waits_for_what_is_in_flight(running: World, inbox: Inbox) -> None:
    running.engine.submit(request(stop=StopParams(max_tokens=50)))
    assert running.engine.drain(30)
    assert running.engine.is_alive
    running.deltas = inbox.deltas
    inbox.wait_for_end_of("r")
    assert running.finish("r").reason is FinishReason.LENGTH


def test_stop_aborts_what_is_in_flight(running: World, inbox: Inbox) -> None:
    running.runner.gate.clear()
    running.engine.submit(request("running", stop=StopParams(max_tokens=100)))
    wait_until(lambda: running.runner.num_steps == 1)
    running.engine.submit(request("waiting"))
    stopper = threading.Thread(target=running.engine.stop)
    stopper.start()
    running.runner.gate.set()
    stopper.join()
    running.deltas = inbox.deltas
    for name in ("running", "waiting"):
        assert running.finish(name).reason is FinishReason.ABORTED
    running.engine.stop()


def test_a_fault_of_the_engine_answers_everyone(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left without an answer, and nobody new is taken in."""

    def commit(*_: object) -> None:
        raise ZeroDivisionError

    world = World(load_ticks=0)
    monkeypatch.setattr(world.scheduler, "commit", commit)
    world.runner.gate.clear()
    world.engine.start(inbox.deliver)
    world.engine.submit(request("a", num_outputs=2, lease=world.adapters.lease(1)))
    wait_until(lambda: world.runner.num_steps == 1)
    world.engine.submit(request("b", lease=world.adapters.lease(2)))
    with capture_logs() as logs:
        world.runner.gate.set()
        inbox.wait_for_end_of("a", "b")
    assert [log["event"] for log in logs] == ["engine_failed"]
    world.deltas = inbox.deltas
    for output in (("a", 0), ("a", 1), ("b", 0)):
        assert isinstance(world.finish(*output).error, InternalError)
    assert not world.engine.is_alive
    with pytest.raises(UnavailableError, match="restart"):
        world.engine.submit(request("c"))
    world.adapters.check_unused()
    world.engine.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls what has no event of its own."""
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came true")
