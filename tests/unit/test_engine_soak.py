"""Random requests, aborts, failures and loads on an engine that is short of everything.

The runner and the adapters are fakes that check each step (see fake_runner and fake_leases). Whatever
happens, each output is what it would be alone, or the beginning of it where it was aborted or failed.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from deltaplane_controlplane.errors import FailedPreconditionError, InternalError, InvalidArgumentError
from deltaplane_server.engine.api import Finish, FinishReason, GenerationRequest, OutputDelta, Usage
from deltaplane_server.engine.engine import Engine
from deltaplane_server.scheduling.lease import AdapterUid, members
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from fake_leases import FakeAdapters
from fake_runner import VOCAB_SIZE, Clock, FakeRunner, LetterDecoder, expected_tokens

BASES = [[1] * 40, [2, 3] * 20]
"""Prompts begin alike, so that they share pages where that is allowed."""

NUM_ADAPTERS = 5

ADAPTERS = st.integers(1, NUM_ADAPTERS)
WEIGHTS = (-1.0, 0.5, 1.0)
WHO = st.lists(st.tuples(ADAPTERS, st.sampled_from(WEIGHTS)), max_size=3, unique_by=lambda term: term[0])
"""Adapters and weights: none are the base model, and one of weight 1 is the adapter itself."""


@dataclass(frozen=True)
class Sent:
    """A request as it was submitted."""

    uid: AdapterUid
    prompt: Sequence[int]
    max_tokens: int
    num_outputs: int
    stop_token: int | None


class Harness:
    """An engine without a thread, all that was sent to it, and all that came out.

    uids: the current version of each adapter.
    """

    def __init__(self, config: SchedulerConfig, load_ticks: int, steps_under_way: int) -> None:
        self.config = config
        self.clock = Clock()
        self.adapters = FakeAdapters(config.max_loras, load_ticks=load_ticks)
        self.runner = FakeRunner(config, self.adapters, max_steps_under_way=steps_under_way)
        self.scheduler = Scheduler(config, self.clock)
        self.engine = Engine(self.scheduler, self.runner, LetterDecoder(), max_waiting=1000)
        self.adapters.wake = self.engine.wake
        self.uids = list(range(1, NUM_ADAPTERS + 1))
        self.sent: dict[str, Sent] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.text: dict[tuple[str, int], str] = defaultdict(str)
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.usages: dict[str, Usage] = {}

    def submit(
        self,
        who: Sequence[tuple[int, float]],
        prompt: Sequence[int],
        max_tokens: int,
        *,
        num_outputs: int = 1,
        tenant: str = "",
        priority: int = 0,
        stream_interval: int = 1,
        stop_token: int | None = None,
    ) -> None:
        """who: adapters and weights, as many as there are slots at most."""
        uid = self.uid_of(who[: self.config.max_loras])
        lease = self.adapters.lease(uid) if uid else None
        request = GenerationRequest(
            request_id=f"r{len(self.sent)}",
            prompt_tokens=prompt,
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(
                max_tokens=max_tokens,
                stop_token_ids=frozenset() if stop_token is None else frozenset({stop_token}),
            ),
            num_outputs=num_outputs,
            lease=lease,
            tenant=tenant,
            priority=priority,
            stream_interval=stream_interval,
        )
        try:
            self.engine.submit(request)
        except InvalidArgumentError:
            assert len(prompt) + max_tokens > self.config.max_sequence_tokens
            if lease is not None:
                lease.release()
            return
        self.sent[request.request_id] = Sent(uid, prompt, max_tokens, num_outputs, stop_token)

    def uid_of(self, who: Sequence[tuple[int, float]]) -> AdapterUid:
        terms = tuple(sorted((self.uids[adapter - 1], weight) for adapter, weight in who))
        if not terms:
            return 0
        return terms[0][0] if len(terms) == 1 and terms[0][1] == 1 else terms

    def step(self) -> None:
        for delta in self.engine.step():
            self._take(delta)
        self.adapters.tick()

    def abort(self, choice: int) -> None:
        request_id = f"r{choice % len(self.sent)}"
        in_flight = self.engine.abort(request_id)
        assert in_flight == (request_id not in self.usages)
        self.step()
        assert request_id in self.usages, "an abort takes more than one step"

    def fail_step(self, *, late: bool) -> None:
        """late: when it is read, not when it is launched."""
        failures = self.runner.late_failures if late else self.runner.failures
        failures.append(RuntimeError("the device is broken"))
        with capture_logs():
            for _ in range(self.runner.max_steps_under_way):
                self.step()
        failures.clear()

    def replace_adapter(self, adapter: int) -> None:
        """A new version comes, and the old one goes at once: its drain deadline has passed."""
        old = self.uids[adapter - 1]
        self.uids[adapter - 1] = max(self.uids) + 1
        self.engine.abort_adapter(old)
        self.engine.forget_adapter(old)
        self.step()
        assert all(name in self.usages for name, sent in self.sent.items() if old in members(sent.uid))

    def break_adapter(self, adapter: int, fails: bool) -> None:
        """Only a load can fail: what is resident goes on."""
        uid = self.uids[adapter - 1]
        if not fails:
            self.adapters.failing.discard(uid)
        elif not self.adapters.is_resident(uid):
            self.adapters.failing.add(uid)

    def check_integrity(self) -> None:
        self.engine.check_integrity()
        self.adapters.check_integrity()

    def finish(self) -> None:
        """Lets all end, and checks what came out and that nothing is left."""
        for _ in range(3000):
            if len(self.usages) == len(self.sent):
                break
            self.step()
            self.check_integrity()
            self.clock.advance(0.05)
        assert self.usages.keys() == self.sent.keys(), "a request starves"
        self.step()  # reads what is still under way of outputs that have ended
        for request_id, sent in self.sent.items():
            self._check_outputs(request_id, sent)
        assert self.scheduler.kv.num_free == self.config.num_pages
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.runner.num_remembered == 0
        self.adapters.check_unused()

    def _take(self, delta: OutputDelta) -> None:
        key = delta.request_id, delta.index
        assert key not in self.finishes, "a delta follows the last one"
        assert delta.request_id not in self.usages
        self.tokens[key] += delta.token_ids
        self.text[key] += delta.text
        if delta.finish is not None:
            self.finishes[key] = delta.finish
        if delta.usage is not None:
            self.usages[delta.request_id] = delta.usage

    def _check_outputs(self, request_id: str, sent: Sent) -> None:
        expected = expected_tokens(sent.uid, sent.prompt, sent.max_tokens)
        num_tokens = 0
        for index in range(sent.num_outputs):
            tokens, finish = self.tokens[request_id, index], self.finishes[request_id, index]
            num_tokens += len(tokens)
            assert tokens == expected[: len(tokens)]
            stopped = finish.reason is FinishReason.STOP
            visible = tokens[:-1] if stopped else tokens
            assert sent.stop_token not in visible
            assert self.text[request_id, index] == LetterDecoder().decode(visible, skip_special_tokens=True)
            if stopped:
                assert tokens[-1] == sent.stop_token
            elif finish.reason is FinishReason.LENGTH:
                assert len(tokens) == sent.max_tokens
            elif finish.reason is FinishReason.ERROR:
                assert isinstance(finish.error, InternalError | FailedPreconditionError)
            else:
                assert finish.reason is FinishReason.ABORTED
        assert self.usages[request_id].completion_tokens == num_tokens


class EngineMachine(RuleBasedStateMachine):
    """All that can happen, in any order."""

    @initialize(
        caching=st.booleans(),
        chunked=st.booleans(),
        num_pages=st.integers(6, 14),
        num_slots=st.integers(1, 3),
        load_ticks=st.integers(0, 3),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 20),
        steps_under_way=st.integers(1, 2),
    )
    def set_up(
        self,
        caching: bool,
        chunked: bool,
        num_pages: int,
        num_slots: int,
        load_ticks: int,
        max_num_seqs: int,
        spare_budget: int,
        steps_under_way: int,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            max_model_len=48,
            num_pages=num_pages,
            page_size=4,
            max_loras=num_slots,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
        )
        self.harness = Harness(config, load_ticks, steps_under_way)

    @rule(
        who=WHO,
        base=st.sampled_from(BASES),
        num_shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 14),
        num_outputs=st.sampled_from([1, 1, 1, 2]),
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.sampled_from([0, 0, 0, 1]),
        stream_interval=st.integers(1, 3),
        stop_token=st.none() | st.integers(0, VOCAB_SIZE - 1),
    )
    def submit(
        self,
        who: list[tuple[int, float]],
        base: list[int],
        num_shared: int,
        tail: list[int],
        max_tokens: int,
        num_outputs: int,
        tenant: str,
        priority: int,
        stream_interval: int,
        stop_token: int | None,
    ) -> None:
        self.harness.submit(
            who,
            base[:num_shared] + tail,
            max_tokens,
            num_outputs=num_outputs,
            tenant=tenant,
            priority=priority,
            stream_interval=stream_interval,
            stop_token=stop_token,
        )

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)

    @precondition(lambda self: self.harness.sent)
    @rule(choice=st.integers(0, 10**6))
    def abort(self, choice: int) -> None:
        self.harness.abort(choice)

    @rule(late=st.booleans())
    def fail_step(self, late: bool) -> None:
        self.harness.fail_step(late=late)

    @rule(adapter=ADAPTERS)
    def replace_adapter(self, adapter: int) -> None:
        self.harness.replace_adapter(adapter)

    @rule(adapter=ADAPTERS, fails=st.booleans())
    def break_adapter(self, adapter: int, fails: bool) -> None:
        self.harness.break_adapter(adapter, fails)

    @invariant()
    def books_balance(self) -> None:
        self.harness.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish()


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(24))
def test_heavy_load(seed: int) -> None:
    """Many requests at once, so that sequences are preempted, adapters evicted and prefixes shared."""
    draw = random.Random(seed)
    max_num_seqs = draw.randint(2, 8)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw.randint(0, 30),
        max_model_len=80,
        num_pages=draw.randint(14, 40),
        page_size=4,
        max_loras=draw.randint(1, 3),
        enable_chunked_prefill=draw.random() < 0.7,
        enable_prefix_caching=draw.random() < 0.6,
    )
    harness = Harness(config, load_ticks=draw.randint(0, 4), steps_under_way=draw.randint(1, 2))
    for _ in range(250):
        event = draw.random()
        if event < 0.3:
            prompt = draw.choice(BASES)[: draw.randint(0, 40)] + [draw.randint(0, 3)] * draw.randint(1, 5)
            chosen = draw.sample(range(1, NUM_ADAPTERS + 1), draw.choice((0, 1, 1, 2, 3)))
            harness.submit(
                [(adapter, draw.choice(WEIGHTS)) for adapter in chosen],
                prompt,
                draw.randint(1, 35),
                num_outputs=draw.choice([1, 1, 1, 3]),
                tenant=draw.choice("abc"),
                priority=draw.choice([0, 0, 0, 1]),
                stop_token=draw.choice([None, draw.randrange(VOCAB_SIZE)]),
            )
        elif event < 0.32 and harness.sent:
            harness.abort(draw.randrange(10**6))
        elif event < 0.325:
            harness.fail_step(late=draw.random() < 0.5)
        elif event < 0.33:
            harness.replace_adapter(draw.randint(1, NUM_ADAPTERS))
        else:
            harness.step()
        harness.check_integrity()
        harness.clock.advance(draw.choice([0.0, 0.01, 0.3]))
    harness.finish()
