"""The scheduler: what goes into a step, and in which order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deltaplane_controlplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane_server.config import EngineConfig
from deltaplane_server.scheduling.lease import AdapterUid
from deltaplane_server.scheduling.plan import StepPlan
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence
from deltaplane_server.scheduling.sequence import SequenceStatus
from fake_leases import FakeAdapters
from fake_runner import Clock, FakeRunner, expected_tokens, make_sequence

STEP_S = 0.02


class Driver:
    """A scheduler with a runner and adapters, whose sequences end at max_tokens and release their leases.

    plans: all steps so far, empty ones included.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        num_pages: int = 100,
        max_model_len: int = 1000,
        num_slots: int = 2,
        load_ticks: int = 2,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = False,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=4,
            max_loras=num_slots,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.clock = Clock()
        self.scheduler = Scheduler(self.config, self.clock)
        self.adapters = FakeAdapters(num_slots, load_ticks=load_ticks)
        self.adapters.wake = self.scheduler.look_again
        self.runner = FakeRunner(self.config, self.adapters)
        self.plans: list[StepPlan] = []
        self.first_token_at: dict[int, float] = {}
        self._count = 0

    def add(
        self,
        num_prompt: int = 4,
        max_tokens: int = 4,
        *,
        uid: AdapterUid = 0,
        tenant: str = "",
        priority: int = 0,
        prompt: Sequence[int] | None = None,
    ) -> TokenSequence:
        self._count += 1
        sequence = make_sequence(
            self._count,
            prompt if prompt is not None else [self._count % 50] * num_prompt,
            max_tokens=max_tokens,
            lease=self.adapters.lease(uid) if uid else None,
            tenant=tenant,
            priority=priority,
            arrival=self.clock(),
        )
        self.config.check_fits(sequence.num_prompt, max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        if plan:
            step = self.runner.submit(plan)
            self.scheduler.launch(plan)
            sampled = step.result()
            self.scheduler.commit(plan, sampled)
            for token in sampled:
                self.first_token_at.setdefault(token.sequence.id, self.clock())
                if token.sequence.num_output == token.sequence.stop.max_tokens:
                    self.finish(token.sequence)
        for sequence, _ in plan.failed:
            self.finish(sequence)
        self.scheduler.check_integrity()
        self.adapters.check_integrity()
        self.adapters.tick()
        self.clock.advance(STEP_S)
        return plan

    def run(self, *until: TokenSequence, limit: int = 2000) -> int:
        """Makes steps until these sequences (default: all) are finished; returns how many."""
        for count in range(limit):
            waited_for = until or tuple(self.scheduler.sequences())
            if all(s.status is SequenceStatus.FINISHED for s in waited_for):
                return count
            self.step()
        raise AssertionError(f"not finished in {limit} steps")

    def run_for(self, seconds: float) -> None:
        end = self.clock() + seconds
        while self.clock() < end:
            self.step()

    def finish(self, sequence: TokenSequence) -> None:
        self.scheduler.finish(sequence)
        self.runner.forget(sequence)
        if sequence.lease is not None:
            sequence.lease.release()

    def check_unused(self) -> None:
        assert self.scheduler.kv.num_free == self.config.num_pages
        self.adapters.check_unused()


def parts(plan: StepPlan) -> list[tuple[int, int]]:
    """What a step computes, as (sequence, number of tokens)."""
    return [(part.sequence.id, part.num_tokens) for part in plan.scheduled]


def is_right(sequence: TokenSequence) -> bool:
    expected = expected_tokens(
        sequence.adapter_uid, sequence.tokens[: sequence.num_prompt], sequence.stop.max_tokens
    )
    return sequence.output_tokens == expected


# The order within a step.


def test_nothing_to_do_is_an_empty_step() -> None:
    assert not Driver().step()


def test_a_prompt_then_a_token_a_step() -> None:
    driver = Driver()
    sequence = driver.add(num_prompt=10, max_tokens=3)
    plans = [driver.step() for _ in range(4)]
    assert [parts(plan) for plan in plans] == [[(1, 10)], [(1, 1)], [(1, 1)], []]
    assert [plan.num_decodes for plan in plans] == [0, 1, 1, 0]
    assert plans[0].started == [sequence]
    assert sequence.started == plans[0].time
    assert is_right(sequence)
    driver.check_unused()


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    driver = Driver(max_num_batched_tokens=16)
    driver.add(num_prompt=5, max_tokens=9)
    driver.step()
    long = driver.add(num_prompt=40, max_tokens=2)
    plans = [driver.step() for _ in range(4)]
    assert [parts(plan) for plan in plans] == [
        [(1, 1), (2, 15)],
        [(1, 1), (2, 15)],
        [(1, 1), (2, 10)],
        [(1, 1), (2, 1)],
    ]
    assert [[part.samples for part in plan.scheduled] for plan in plans] == [
        [True, False],
        [True, False],
        [True, True],
        [True, True],
    ]
    assert is_right(long)


def test_decodes_then_prefills_under_way_then_new_ones() -> None:
    driver = Driver(max_num_batched_tokens=20)
    driver.add(num_prompt=4, max_tokens=20)
    driver.add(num_prompt=28)
    driver.step()
    driver.add(num_prompt=1)
    driver.add(num_prompt=30)
    assert parts(driver.step()) == [(1, 1), (3, 1), (2, 12), (4, 6)]
    assert driver.plans[-1].num_decodes == 2, "a last chunk of one token is a decode"


def test_no_more_sequences_than_seats() -> None:
    driver = Driver(max_num_seqs=3)
    for _ in range(7):
        driver.add()
    driver.run()
    assert max(len(plan.scheduled) for plan in driver.plans) == 3
    driver.check_unused()


def test_every_sequence_gets_a_token_within_the_smallest_budget() -> None:
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=4)
    sequences = [driver.add(num_prompt=9) for _ in range(6)]
    driver.run()
    assert all(map(is_right, sequences))


def test_higher_priority_starts_first() -> None:
    driver = Driver(max_num_seqs=1)
    low, high = driver.add(), driver.add(priority=1)
    driver.run(high)
    assert low.started is None


@pytest.mark.parametrize("num_prompt", [30, 100])
def test_without_chunks_a_prompt_goes_in_one_step(num_prompt: int) -> None:
    driver = Driver(max_num_batched_tokens=32, max_model_len=110, enable_chunked_prefill=False)
    driver.add(num_prompt=4, max_tokens=20)
    driver.step()
    sequence = driver.add(num_prompt=num_prompt)
    assert parts(driver.step()) == [(1, 1), (2, num_prompt)]
    assert driver.config.max_step_tokens == 110 + 8
    driver.run()
    assert is_right(sequence)


def test_without_chunks_what_does_not_fit_waits_for_the_next_step() -> None:
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=20, max_model_len=60, enable_chunked_prefill=False)
    driver.add(num_prompt=40)
    driver.add(num_prompt=40)
    assert parts(driver.step()) == [(1, 40)]
    assert parts(driver.step()) == [(1, 1), (2, 40)]


# KV pages.


def test_preempted_sequences_go_on_with_the_tokens_they_would_have_had() -> None:
    driver = Driver(num_pages=12)
    sequences = [driver.add(num_prompt=7, max_tokens=30) for _ in range(4)]
    driver.run()
    assert sum(s.num_preemptions for s in sequences) > 0
    assert sequences[0].num_preemptions == 0, "the oldest is never preempted"
    assert all(map(is_right, sequences))
    driver.check_unused()


def test_the_lowest_priority_then_the_latest_is_preempted() -> None:
    driver = Driver(num_pages=9)
    low = driver.add(num_prompt=8, max_tokens=20, priority=0)
    driver.step()
    high = driver.add(num_prompt=8, max_tokens=20, priority=1)
    later = driver.add(num_prompt=8, max_tokens=20, priority=1)
    victims = [victim for _ in range(40) for victim in driver.step().preempted]
    assert victims[:2] == [low, later]
    assert high not in victims
    driver.run()
    assert all(map(is_right, (low, high, later)))


def test_a_step_that_preempts_starts_nothing() -> None:
    driver = Driver(num_pages=12)
    for _ in range(6):
        driver.add(num_prompt=7, max_tokens=30)
    driver.run()
    assert all(not plan.started for plan in driver.plans if plan.preempted)


def test_preempted_sequences_find_their_pages_in_the_prefix_cache() -> None:
    driver = Driver(num_pages=12, enable_prefix_caching=True)
    sequences = [driver.add(num_prompt=7, max_tokens=30) for _ in range(4)]
    driver.run()
    assert sum(s.num_preemptions for s in sequences) > 0
    assert driver.scheduler.kv.hits > 0
    assert all(s.num_cached == 0 for s in sequences), "only what the first start found is counted"
    assert all(map(is_right, sequences))


def test_short_prompts_run_past_a_long_one_that_does_not_fit() -> None:
    """Case 19, and its other side: the long one gets its turn."""
    driver = Driver(num_pages=105, max_num_batched_tokens=512)
    running = driver.add(num_prompt=40, max_tokens=300)
    driver.step()
    long = driver.add(num_prompt=396)
    short = [driver.add(num_prompt=8, max_tokens=8) for _ in range(5)]
    driver.run(*short)
    assert long.started is None
    assert running.status is SequenceStatus.RUNNING
    while long.status is SequenceStatus.WAITING:
        driver.add(num_prompt=8, max_tokens=150)
        plan = driver.step()
        if plan.time - long.arrival > driver.config.ageing_s + STEP_S and long not in plan.started:
            assert all(s.num_preemptions for s in plan.started), "others are held back"
    assert long.blocked_since is None
    driver.run(long)
    assert is_right(long)


def test_one_page_is_enough() -> None:
    driver = Driver(num_pages=1)
    sequences = [driver.add(num_prompt=2, max_tokens=2) for _ in range(3)]
    driver.run()
    assert all(map(is_right, sequences))


def test_many_long_prompts_do_not_hide_a_short_one() -> None:
    driver = Driver(num_pages=105, max_num_batched_tokens=512)
    driver.add(num_prompt=40, max_tokens=300)
    driver.step()
    for _ in range(50):
        driver.add(num_prompt=396)
    short = driver.add(num_prompt=8)
    driver.step()
    assert short.status is SequenceStatus.RUNNING


def test_some_pages_are_spared_for_running_sequences() -> None:
    driver = Driver(num_pages=10)
    driver.add(num_prompt=20)
    driver.add(num_prompt=20)
    assert parts(driver.step()) == [(1, 20)], "10 pages would fit both and leave none to grow"


def test_a_sequence_may_take_all_pages_when_it_is_alone() -> None:
    driver = Driver(num_pages=10)
    sequence = driver.add(num_prompt=36)
    driver.run()
    assert is_right(sequence)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field", "numbers"),
    [
        (0, 1, "prompt", []),
        (100, 1, "prompt", ["100 tokens", "length of 100", "at most 99"]),
        (500, 1, "prompt", ["500 tokens", "length of 100"]),
        (60, 41, "stop.max_tokens", ["41", "60 tokens", "length of 100", "at most 40"]),
        (60, 0, "stop.max_tokens", ["0"]),
    ],
)
def test_what_can_never_fit_is_refused(
    num_prompt: int, max_tokens: int, field: str, numbers: list[str]
) -> None:
    config = Driver(max_model_len=100).config
    with pytest.raises(InvalidArgumentError) as caught:
        config.check_fits(num_prompt, max_tokens)
    [violation] = caught.value.violations
    assert violation.field == field
    assert all(number in violation.description for number in numbers)
    config.check_fits(99, 1)
    config.check_fits(60, 40)


def test_what_is_longer_than_all_pages_is_refused() -> None:
    config = Driver(max_model_len=1000, num_pages=10).config
    assert config.max_sequence_tokens == config.kv_tokens == 40
    with pytest.raises(InvalidArgumentError, match=r"prompt: has 40 tokens.* the 40 tokens that all"):
        config.check_fits(40, 1)
    with pytest.raises(InvalidArgumentError, match=r"stop\.max_tokens: 5 .* 36 tokens .* at most 4"):
        config.check_fits(36, 5)


# Adapters.


def test_a_step_serves_base_and_several_adapters() -> None:
    driver = Driver(num_slots=2)
    sequences = [driver.add(uid=uid) for uid in (0, 1, 2, 1)]
    driver.run()
    assert all(map(is_right, sequences))
    assert max(len({p.slot for p in plan.scheduled}) for plan in driver.plans) == 3
    assert driver.adapters.loads == [1, 2], "one load each"
    driver.check_unused()


def test_base_and_warm_requests_pass_a_cold_one() -> None:
    """They start in the step in which they would have without it."""
    driver = Driver(load_ticks=10)
    driver.adapters.load(1)
    cold = driver.add(uid=2)
    warm, base = driver.add(uid=1), driver.add()
    assert driver.step().started == [warm, base]
    assert driver.adapters.loads == [1, 2], "its load is under way"
    driver.run(cold)
    assert cold.adapter_wait == pytest.approx(10 * STEP_S)
    assert warm.adapter_wait == base.adapter_wait == 0


def test_all_that_wait_for_an_adapter_are_told_how_long() -> None:
    driver = Driver(load_ticks=5, max_num_seqs=1)
    first = driver.add(uid=1)
    driver.step()
    second = driver.add(uid=1)
    driver.run()
    third = driver.add(uid=1)
    driver.run()
    waits = [s.adapter_wait for s in (first, second, third)]
    assert waits == pytest.approx([5 * STEP_S, 4 * STEP_S, 0])


def test_an_adapter_is_loaded_while_all_seats_are_taken() -> None:
    driver = Driver(max_num_seqs=1, load_ticks=3)
    driver.add(max_tokens=10)
    driver.step()
    waiting = driver.add(uid=1)
    for _ in range(5):
        driver.step()
    assert driver.adapters.is_resident(1)
    assert waiting.started is None


def test_one_slot_is_shared_in_turn() -> None:
    """A is always busy, and B still runs within a bounded wait."""
    driver = Driver(num_slots=1, load_ticks=1, max_num_seqs=4)
    max_tokens = 20
    driver.add(uid=1, max_tokens=max_tokens)
    driver.step()
    other = driver.add(uid=2, max_tokens=max_tokens)
    while other.status is not SequenceStatus.FINISHED:
        driver.add(uid=1, max_tokens=max_tokens)
        driver.step()
        assert driver.clock() - other.arrival < 5
    assert other.started is not None
    assert other.started - other.arrival <= driver.config.ageing_s + 2 * max_tokens * STEP_S
    driver.run()
    assert driver.adapters.loads == [1, 2, 1], "and A goes on after it"
    driver.check_unused()


def test_running_sequences_of_a_closed_adapter_are_not_disturbed() -> None:
    """Its slot is taken only when they are done."""
    driver = Driver(num_slots=1)
    long = driver.add(uid=1, max_tokens=120)
    driver.step()
    other = driver.add(uid=2)
    driver.run()
    assert is_right(long)
    assert is_right(other)
    assert long.num_preemptions == 0
    assert driver.adapters.evictions == [1]


def test_only_the_adapter_that_ends_first_is_closed_for_one_that_waits() -> None:
    driver = Driver(num_slots=3, load_ticks=1, num_pages=1000)
    for uid, max_tokens in {1: 300, 2: 200, 3: 390}.items():
        driver.add(uid=uid, max_tokens=max_tokens)
    driver.run_for(2 * STEP_S)
    driver.add(uid=4)
    driver.run_for(driver.config.ageing_s + 2 * STEP_S)
    late = [driver.add(uid=uid, max_tokens=2) for uid in (1, 2, 3)]
    driver.run_for(1.0)
    assert [sequence.started is None for sequence in late] == [False, True, False]
    driver.run()
    assert driver.adapters.evictions == [2, 4], "and it comes back when the other is done"


def test_no_adapter_is_closed_for_a_slow_load() -> None:
    """There is a free slot: closing a busy adapter would not help."""
    driver = Driver(num_slots=2, load_ticks=500)
    driver.adapters.load(1)
    driver.add(uid=2)
    for _ in range(200):
        sequence = driver.add(uid=1, max_tokens=2)
        driver.step()
        driver.step()
        assert sequence.status is SequenceStatus.FINISHED


def test_a_pinned_adapter_that_is_closed_in_vain_is_followed_by_another() -> None:
    driver = Driver(num_slots=2, load_ticks=1)
    for uid in (1, 2):
        driver.add(uid=uid, max_tokens=10 * uid)
    driver.step()
    driver.step()
    driver.adapters.pinned.add(1)
    other = driver.add(uid=3)
    while other.started is None:
        for uid in (1, 2):
            driver.add(uid=uid, max_tokens=10 * uid)
        driver.step()
        assert driver.clock() - other.arrival < 10
    assert driver.adapters.evictions == [2]


def test_adapters_open_again_when_the_one_they_were_closed_for_is_gone() -> None:
    driver = Driver(num_slots=1)
    driver.add(uid=1, max_tokens=300)
    driver.step()
    other = driver.add(uid=2)
    while driver.clock() - other.arrival < driver.config.ageing_s + 2 * STEP_S:
        driver.step()
    held_back = driver.add(uid=1)
    driver.step()
    assert held_back.started is None
    driver.finish(other)
    driver.step()
    assert held_back.started is not None


# Compositions.


def composition(*uids: int, weight: float = 0.5) -> AdapterUid:
    return tuple((uid, weight) for uid in uids)


def test_a_step_serves_compositions_beside_their_adapters() -> None:
    driver = Driver(num_slots=3)
    uids = [0, composition(1, 2), 1, composition(2, 3), composition(1, 2), composition(1, 2, weight=0.25), 2]
    sequences = [driver.add(uid=uid) for uid in uids]
    driver.run()
    assert all(map(is_right, sequences))
    largest = max(driver.plans, key=lambda plan: len(plan.scheduled))
    assert len(largest.scheduled) == len(uids)
    assert largest.num_adapters == 3
    assert driver.adapters.loads == [1, 2, 3], "one load each"
    driver.check_unused()


def test_base_warm_and_other_compositions_pass_a_cold_one() -> None:
    """It waits for the last of its adapters, and its wait is that one's."""
    driver = Driver(load_ticks=10, num_slots=3)
    for uid in (1, 2):
        driver.adapters.load(uid)
    cold = driver.add(uid=composition(1, 3))
    others = [driver.add(uid=uid) for uid in (composition(1, 2), 1, 0)]
    assert driver.step().started == others
    driver.run(cold)
    assert cold.adapter_wait == pytest.approx(10 * STEP_S)
    assert all(other.adapter_wait == 0 for other in others)


@pytest.mark.parametrize(
    ("uid", "num_closed"), [(composition(3, 4), 2), (composition(1, 3), 1), (composition(3), 1)]
)
def test_a_composition_has_its_turn_though_others_never_rest(uid: AdapterUid, num_closed: int) -> None:
    """With two slots, which it needs both; one of its adapters may be among those that never rest, and is not
    closed in its favour."""
    driver = Driver(num_slots=2, load_ticks=1, max_num_seqs=8)
    max_tokens = 20
    waiting = None
    while waiting is None or waiting.status is not SequenceStatus.FINISHED:
        for busy in (1, 2):
            driver.add(uid=busy, max_tokens=max_tokens)
        driver.step()
        if len(driver.plans) == 3:
            waiting = driver.add(uid=uid, max_tokens=max_tokens)
        assert waiting is None or driver.clock() - waiting.arrival < 5
    assert waiting.started is not None
    longest = num_closed * (driver.config.ageing_s + 2 * max_tokens * STEP_S)
    assert waiting.started - waiting.arrival <= longest
    driver.run()
    driver.check_unused()


def test_an_adapter_has_its_turn_though_a_composition_never_rests() -> None:
    driver = Driver(num_slots=2, load_ticks=1)
    driver.add(uid=composition(1, 2), max_tokens=20)
    driver.step()
    other = driver.add(uid=3)
    while other.started is None:
        driver.add(uid=composition(1, 2), max_tokens=20)
        driver.step()
        assert driver.clock() - other.arrival < 5
    driver.run()
    driver.check_unused()


def test_compositions_that_need_each_others_adapters_take_turns() -> None:
    driver = Driver(num_slots=3, load_ticks=1)
    pairs = [composition(1, 2), composition(3, 4), composition(2, 3), composition(1, 4)]
    sequences = [driver.add(uid=uid, max_tokens=3 + n % 5) for n, uid in enumerate(pairs * 6)]
    driver.run()
    assert all(map(is_right, sequences))
    driver.check_unused()


def test_a_composition_is_preempted_and_goes_on_with_the_tokens_it_would_have_had() -> None:
    driver = Driver(num_pages=12, num_slots=2, load_ticks=1)
    uids = [0, composition(1, 2), composition(1, 2), composition(1, 2, weight=-1.0)]
    sequences = [driver.add(num_prompt=7, max_tokens=30, uid=uid) for uid in uids]
    driver.run()
    assert sum(s.num_preemptions for s in sequences[1:]) > 0
    assert all(map(is_right, sequences))
    driver.check_unused()


def test_what_was_asked_for_before_an_adapter_is_closed_gets_in_first() -> None:
    """`asked` has been promised the slot of 1 and waits for KV pages alone, when 1 is closed in favour of
    `late`, which cannot have that slot before `asked` has had it; and has it then, though more come for 1."""
    driver = Driver(num_slots=2, num_pages=96, max_num_batched_tokens=512)
    driver.adapters.pinned.add(2)
    driver.add(num_prompt=240, max_tokens=60)
    busy = driver.add(uid=composition(1, 2), max_tokens=70)
    asked = driver.add(uid=1, num_prompt=140)
    late = driver.add(uid=3, priority=1)
    while asked.started is None:
        driver.step()
        assert driver.clock() - asked.arrival < 10
    assert late.id not in driver.first_token_at
    while late.id not in driver.first_token_at:
        driver.add(uid=1, max_tokens=20)
        driver.step()
        assert driver.clock() - asked.started < busy.stop.max_tokens * STEP_S
    driver.run()
    driver.check_unused()


def test_a_member_that_cannot_be_loaded_fails_its_compositions_alone() -> None:
    driver = Driver(num_slots=2)
    driver.adapters.failing.add(2)
    failing = driver.add(uid=composition(1, 2))
    other = driver.add(uid=composition(1))
    plan = driver.step()
    assert [sequence for sequence, _ in plan.failed] == [failing]
    driver.run()
    assert is_right(other)
    driver.check_unused()


# Slots that stay taken.


def test_all_slots_pinned_means_waiting() -> None:
    """Base requests go on meanwhile, and the wait ends with the pin."""
    driver = Driver(num_slots=2)
    for uid in (1, 2):
        driver.adapters.load(uid)
        driver.adapters.pinned.add(uid)
    waiting = driver.add(uid=3)
    for _ in range(100):
        driver.add(max_tokens=1)
        driver.step()
    assert waiting.status is SequenceStatus.WAITING
    driver.adapters.unpin(1)
    driver.run()
    assert is_right(waiting)
    driver.check_unused()


def test_a_long_queue_of_cold_adapters_does_not_thrash() -> None:
    driver = Driver(num_slots=2, load_ticks=3, max_num_seqs=16)
    sequences = [driver.add(uid=uid, max_tokens=5) for uid in range(1, 31) for _ in range(2)]
    driver.run()
    assert driver.adapters.loads == list(range(1, 31)), "each is loaded once, in the order of arrival"
    assert all(map(is_right, sequences))


def test_a_resident_adapter_starts_though_many_cold_ones_are_asked_for() -> None:
    """A pinned one, say: it is not among those asked for, and needs not be."""
    driver = Driver(num_slots=3, load_ticks=100)
    driver.adapters.load(1)
    driver.adapters.pinned.add(1)
    for uid in range(2, 12):
        driver.add(uid=uid)
    driver.step()
    warm = driver.add(uid=1)
    assert driver.step().started == [warm]


def test_an_adapter_that_became_resident_by_itself_starts_after_a_wake() -> None:
    driver = Driver(num_slots=3, load_ticks=100)
    for uid in range(2, 12):
        driver.add(uid=uid)
    late = driver.add(uid=20)
    driver.step()
    driver.adapters.num_slots += 1
    driver.adapters.load(20)
    driver.scheduler.look_again()
    assert driver.step().started == [late]


def test_an_adapter_that_cannot_be_loaded_fails_its_sequences_alone() -> None:
    driver = Driver()
    driver.adapters.failing.add(1)
    failing = [driver.add(uid=1), driver.add(uid=1)]
    good = [driver.add(uid=2), driver.add()]
    plan = driver.step()
    assert [sequence for sequence, _ in plan.failed] == failing
    assert all(isinstance(error, FailedPreconditionError) for _, error in plan.failed)
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in failing)
    driver.run()
    assert all(map(is_right, good))
    driver.check_unused()


def test_a_load_that_fails_later_fails_its_sequences() -> None:
    driver = Driver(load_ticks=5)
    sequence = driver.add(uid=1)
    driver.step()
    driver.adapters.failing.add(1)
    assert [failed for failed, _ in driver.step().failed] == [sequence]
    assert not driver.step()
    driver.check_unused()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_finish_takes_everything_back_at_once(num_steps: int) -> None:
    """While waiting, in prefill and in decode."""
    driver = Driver(max_num_batched_tokens=10, load_ticks=0)
    sequence = driver.add(num_prompt=18, max_tokens=10, uid=1)
    for _ in range(num_steps):
        driver.step()
    driver.finish(sequence)
    driver.finish(sequence)
    driver.scheduler.check_integrity()
    driver.check_unused()
    assert not driver.step()


# Tenants.


@pytest.mark.parametrize("num_heavy", [10, 40])
def test_a_small_tenant_does_not_wait_behind_a_large_one(num_heavy: int) -> None:
    """Its time to first token is at most twice what it is alone, in steps."""

    def steps_to_first_token(num_heavy: int) -> list[float]:
        driver = Driver(max_num_seqs=32, max_num_batched_tokens=64, num_pages=1000)
        small = []
        for number in range(300):
            if number % 10 == 0:
                for _ in range(num_heavy):
                    driver.add(num_prompt=16, max_tokens=8, tenant="large")
                small.append(driver.add(num_prompt=32, max_tokens=8, tenant="small"))
            driver.step()
        driver.run(*small)
        return [1 + round((driver.first_token_at[s.id] - s.arrival) / STEP_S) for s in small]

    assert max(steps_to_first_token(0)) == 1
    assert max(steps_to_first_token(num_heavy)) <= 2


def test_prompts_and_outputs_are_charged() -> None:
    """A tenant of long outputs is behind one of short ones with as many requests."""
    driver = Driver(max_num_seqs=1)
    driver.add(max_tokens=50, tenant="a")
    driver.add(max_tokens=2, tenant="b")
    driver.add(max_tokens=2, tenant="a")
    driver.add(max_tokens=2, tenant="b")
    driver.run()
    started = [sequence.tenant for plan in driver.plans for sequence in plan.started]
    assert started == ["a", "b", "b", "a"]


# The configuration.


def test_a_budget_below_the_seats_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"max_num_batched_tokens: 16 .* max_num_seqs = 32"):
        Driver(max_num_seqs=32, max_num_batched_tokens=16)


@pytest.mark.parametrize("field", ["max_num_seqs", "max_model_len", "num_pages", "page_size"])
def test_sizes_of_nothing_are_refused(field: str) -> None:
    size: dict[str, Any] = {field: 0}
    with pytest.raises(InvalidArgumentError, match=f"{field}: must be at least 1; got 0"):
        replace(Driver().config, **size)


def test_it_comes_from_the_configuration_of_the_engine() -> None:
    engine = EngineConfig(model="m", served_model_name="m", max_num_seqs=3, max_loras=7, page_size=8)
    config = SchedulerConfig.of(engine, max_model_len=50, num_pages=9)
    assert (config.max_num_seqs, config.max_loras, config.page_size) == (3, 7, 8)
    assert (config.max_model_len, config.num_pages, config.max_step_tokens) == (50, 9, 512)
