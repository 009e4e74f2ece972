"""The runner against transformers in float32: the same greedy tokens, log-probabilities within 1e-4."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from deltaplane_kernels.linear import BaseProduct
from deltaplane_kernels.lora_segments import Segments, Slots
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.runner import ModelRunner
from deltaplane_server.execution.step_inputs import LoraPool
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.models.config import load_decoder_config
from deltaplane_server.models.decoder import Decoder
from deltaplane_server.models.weights import Checkpoint
from deltaplane_server.scheduling.plan import NO_SLOT, SampledToken, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence
from kernel_by_kernel import KernelByKernel
from peft_factory import make_tiny_model

PAGE = 16
VOCAB = 260
NUM_NEW = 6
LENGTHS = (1, 2, 15, 16, 17, 61, 130, 300)
CPU = torch.device("cpu")


@dataclass
class Driver:
    """Plans steps by hand. Pages come in random order, and hold NaN until they are first used."""

    folder: Path
    dtype: torch.dtype = torch.float32
    max_model_len: int | None = None
    lora_pool: LoraPool | None = None
    num_pages: int = 256
    steps: list[list[SampledToken]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = load_decoder_config(self.folder, self.max_model_len)
        decoder = Decoder(config, Checkpoint.open(self.folder), self.dtype, CPU)
        self.cache = KVCache(config, num_pages=self.num_pages, page_size=PAGE, dtype=self.dtype, device=CPU)
        self.cache.pages.fill_(torch.nan)
        self.runner = ModelRunner(decoder, self.cache, TokenFeed(64, 4096, CPU), self.lora_pool)
        self.free = list(range(self.num_pages))
        random.Random(0).shuffle(self.free)
        self._ids = iter(range(1, 1_000_000))

    def sequence(self, prompt: Sequence[int], **sampling: Any) -> TokenSequence:
        params = SamplingParams(**{"temperature": 0.0, "logprobs": VOCAB, **sampling})
        number = next(self._ids)
        return TokenSequence(
            number, f"r{number}", 0, list(prompt), len(prompt), params, StopParams(max_tokens=1000)
        )

    def step(self, parts: Iterable[tuple[TokenSequence, int]]) -> list[SampledToken]:
        """Computes the next so many tokens of each sequence, and appends the tokens that were drawn."""
        sampled = self.launch(parts)
        self.read(sampled)
        return sampled

    def launch(self, parts: Iterable[tuple[TokenSequence, int]]) -> list[SampledToken]:
        """Computes them; the tokens that were drawn are pending."""
        scheduled = []
        for sequence, count in parts:
            start = sequence.num_computed
            while len(sequence.pages) * PAGE < start + count:
                sequence.pages.append(self.free.pop())
            samples = start + count == sequence.num_tokens
            scheduled.append(ScheduledSequence(sequence, start, count, NO_SLOT, samples))
        scheduled.sort(key=lambda s: s.num_tokens > 1 or not s.samples)
        num_decodes = sum(s.num_tokens == 1 and s.samples for s in scheduled)
        sampled = self.runner.submit(StepPlan(scheduled, num_decodes)).result()
        assert [s.sequence for s in sampled] == [s.sequence for s in scheduled if s.samples]
        for s in scheduled:
            s.sequence.num_computed = s.end
            s.sequence.num_pending += s.samples
        return sampled

    def read(self, sampled: list[SampledToken]) -> None:
        """Appends tokens that were drawn."""
        for token in sampled:
            token.sequence.num_pending -= 1
            token.sequence.tokens.append(token.token_id)
        self.steps.append(sampled)

    def run(self, sequences: Sequence[TokenSequence], num_new: int, chunk: int = 10_000) -> None:
        """Until each has num_new tokens more than its prompt; at most `chunk` tokens of a sequence a step."""
        while waiting := [s for s in sequences if s.num_output < num_new]:
            self.step((s, min(chunk, s.num_tokens - s.num_computed)) for s in waiting)

    def run_ahead(self, sequences: Sequence[TokenSequence], num_new: int) -> None:
        """As run(), with each step launched before the tokens of the one before it are known."""
        unread: list[SampledToken] = []
        while waiting := [s for s in sequences if s.num_drawn < num_new]:
            drawn = self.launch((s, s.num_tokens - s.num_computed) for s in waiting)
            self.read(unread)
            unread = drawn
        self.read(unread)

    def preempt(self, sequence: TokenSequence) -> None:
        self.free = sequence.pages + self.free
        sequence.pages = []
        sequence.num_computed = 0

    def logprobs(self, sequence: TokenSequence) -> torch.Tensor:
        """[tokens drawn, vocabulary]: of the distributions that the sequence's tokens came from."""
        rows = []
        for token in (token for step in self.steps for token in step if token.sequence is sequence):
            row = torch.empty(VOCAB)
            ids, values = zip(*token.top, strict=True)
            row[list(ids)] = torch.tensor(values)
            rows.append(row)
        return torch.stack(rows)


@dataclass(frozen=True)
class Continuation:
    tokens: list[int]
    logprobs: torch.Tensor


@torch.inference_mode()
def reference(
    folder: Path, prompts: Sequence[Sequence[int]], num_new: int = NUM_NEW, dtype: torch.dtype = torch.float32
) -> list[Continuation]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # no end of sequence
    continuations = []
    for prompt in prompts:
        output = model.generate(
            input_ids=torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_new,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = torch.cat(output.logits).float().log_softmax(-1)
        continuations.append(Continuation(output.sequences[0, len(prompt) :].tolist(), logprobs))
    return continuations


@lru_cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(1000 * seed + length)
    return tuple(generator.randrange(256) for _ in range(length))


def check(driver: Driver, sequence: TokenSequence, expected: Continuation, atol: float = 1e-4) -> None:
    assert sequence.output_tokens == expected.tokens
    torch.testing.assert_close(driver.logprobs(sequence), expected.logprobs, rtol=0, atol=atol)


def check_family(folder: Path, lengths: Sequence[int] = LENGTHS, chunk: int = 10_000, **driver: Any) -> None:
    prompts = [prompt(length) for length in lengths]
    tested = Driver(folder, **driver)
    sequences = [tested.sequence(tokens) for tokens in prompts]
    tested.run(sequences, NUM_NEW, chunk)
    for sequence, expected in zip(sequences, reference(folder, prompts), strict=True):
        check(tested, sequence, expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"head_dim": 64, "num_key_value_heads": 1}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 50}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 33,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
)
def test_families_equal_transformers(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Prompts of 1 to 300 tokens; chunks of 61 make steps of decodes and prefills side by side."""
    check_family(make_tiny_model(tmp_path, family, **options), chunk=61)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "factor": 1.25,
        "original_max_position_embeddings": 400,
        "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 3.0],
        "long_factor": [4.0] * 8,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scalings_equal_transformers(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path, "llama", rope_parameters={"rope_theta": 500.0, **ROPES[kind]})
    check_family(folder, lengths=(5, 130, 300), chunk=61)


def test_a_step_goes_on_from_tokens_that_are_not_read_yet(llama: Path) -> None:
    """Sequences come and go, so that what a step drew for one lies in another row of the next step."""
    driver = Driver(llama)
    prompts = [prompt(length) for length in LENGTHS]
    sequences = [driver.sequence(tokens) for tokens in prompts]
    driver.run_ahead(sequences[:3], 2)
    driver.run_ahead(sequences[1:], 4)
    driver.run_ahead(sequences[::-1], NUM_NEW)
    for sequence, expected in zip(sequences, reference(llama, prompts), strict=True):
        check(driver, sequence, expected)


def test_a_pending_token_is_that_of_the_step_before(llama: Path) -> None:
    driver = Driver(llama)
    one, other = driver.sequence(prompt(5)), driver.sequence(prompt(7))
    driver.launch([(one, 5)])
    driver.step([(other, 7)])
    with pytest.raises(KeyError):
        driver.launch([(one, 1)])


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 299])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_chunks_of_any_size_give_the_same(tmp_path: Path, family: str, chunk: int) -> None:
    window = {"sliding_window": 50} if family == "mistral" else {}
    lengths = (17, 300) if chunk > 1 else (17, 90)
    check_family(make_tiny_model(tmp_path, family, **window), lengths, chunk)


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path: Path, llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_family(tmp_path, lengths=(17,))


def test_bfloat16_is_near_transformers(llama: Path) -> None:
    prompts = [prompt(length) for length in (3, 40, 130)]
    driver = Driver(llama, dtype=torch.bfloat16)
    sequences = [driver.sequence(tokens) for tokens in prompts]
    driver.run(sequences, 1)
    for sequence, expected in zip(sequences, reference(llama, prompts, 1, torch.bfloat16), strict=True):
        torch.testing.assert_close(driver.logprobs(sequence), expected.logprobs, rtol=0, atol=0.1)


def test_a_preempted_sequence_goes_on_as_it_would_have(llama: Path) -> None:
    prompts = [prompt(length, seed=1) for length in (40, 70)]
    expected = reference(llama, prompts, 12)
    driver = Driver(llama)
    victim, other = sequences = [driver.sequence(tokens) for tokens in prompts]
    driver.run(sequences, 5)
    driver.preempt(victim)
    driver.run([other], 8)
    driver.run(sequences, 12, chunk=13)
    check(driver, victim, expected[0])
    check(driver, other, expected[1])


def test_greedy_output_does_not_depend_on_the_batch(llama: Path) -> None:
    alone = Driver(llama)
    subject = alone.sequence(prompt(33))
    alone.run([subject], 10)

    crowded = Driver(llama)
    crowd = [crowded.sequence(prompt(length)) for length in LENGTHS]
    crowded.run(crowd, 2)
    guest = crowded.sequence(prompt(33))
    crowded.run([*crowd, guest], 10, chunk=9)

    assert guest.output_tokens == subject.output_tokens
    torch.testing.assert_close(crowded.logprobs(guest), alone.logprobs(subject), rtol=0, atol=1e-5)


def test_drawn_output_depends_neither_on_the_batch_nor_on_preemption(llama: Path) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    alone = Driver(llama)
    subject = alone.sequence(prompt(33), **sampling)
    alone.run([subject], 16)

    crowded = Driver(llama)
    guest = crowded.sequence(prompt(33), **sampling)
    crowd = [crowded.sequence(prompt(length), temperature=1.0) for length in LENGTHS]
    crowded.run([guest, *crowd], 7)
    crowded.preempt(guest)
    crowded.run(crowd, 9)
    crowded.run([*crowd, guest], 16, chunk=11)

    assert guest.output_tokens == subject.output_tokens


def test_a_forgotten_sequence_leaves_nothing_behind(llama: Path) -> None:
    driver = Driver(llama)
    first = driver.sequence(prompt(20), temperature=1.0, seed=5, repetition_penalty=1.3)
    driver.run([first], 8)
    driver.runner.forget(first)
    second = driver.sequence(prompt(20), temperature=1.0, seed=5, repetition_penalty=1.3)
    second.id = first.id
    driver.run([second], 8)
    assert second.output_tokens == first.output_tokens


def test_what_a_page_held_before_does_not_reach_its_next_owner(llama: Path) -> None:
    """Pages hold NaN before each use, as after an overflow in float16."""
    driver = Driver(llama)
    for length in (1, 15, 16, 17, 40):
        sequence = driver.sequence(prompt(length))
        driver.run([sequence], 20, chunk=16)
        assert driver.logprobs(sequence).isfinite().all()


def test_reports_as_many_logprobs_as_each_asked_for(llama: Path) -> None:
    driver = Driver(llama)
    none, own, three = (driver.sequence(prompt(9), logprobs=k) for k in (None, 0, 3))
    first, second, third = driver.step((s, 9) for s in (none, own, three))
    assert (first.logprob, first.top) == (None, ())
    assert second.logprob is not None
    assert second.top == ()
    assert len(third.top) == 3
    assert third.top[0] == (third.token_id, third.logprob)
    assert [value for _, value in third.top] == sorted((value for _, value in third.top), reverse=True)


def test_a_step_that_samples_nothing_answers_nothing(llama: Path) -> None:
    driver = Driver(llama)
    assert driver.step([(driver.sequence(prompt(40)), 20)]) == []
    assert driver.runner.submit(StepPlan()).result() == []


def test_pages_that_are_too_few_are_refused(llama: Path) -> None:
    driver = Driver(llama)
    sequence = driver.sequence(prompt(40))
    sequence.pages = [0, 1]
    plan = StepPlan([ScheduledSequence(sequence, 0, 40, NO_SLOT, True)])
    with pytest.raises(ValueError, match="2 pages of 16 tokens do not hold 40 tokens"):
        driver.runner.submit(plan)


@dataclass
class ShiftingPool(KernelByKernel):
    """Adds 1 to the rows of slot 0 in every packed linear, and notes what it was called with."""

    segments: list[list[tuple[Slots, int]]] = field(default_factory=list)
    calls: list[tuple[int, str, int, int]] = field(default_factory=list)
    side: None = None

    def step(self, segments: Segments) -> "ShiftingPool | None":
        self.segments.append(list(segments))
        return self if any(slot != NO_SLOT for slot, _ in segments) else None

    def base_product(self, layer: int, linear: str, x: torch.Tensor, base: BaseProduct) -> torch.Tensor:
        return base(x)

    def add_delta(self, layer: int, linear: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls.append((layer, linear, x.shape[1], y.shape[1]))
        row = 0
        for slot, count in self.segments[-1]:
            if slot == 0:
                y[row : row + count] += 1
            row += count


def test_adapters_are_told_their_rows_and_change_those_alone(llama: Path) -> None:
    pool = ShiftingPool()
    driver = Driver(llama, lora_pool=pool)
    slots: list[Slots] = [NO_SLOT, 0, ((1, 0.5), (0, -2.0))]
    base, adapted, composed = sequences = [driver.sequence(prompt(9)) for _ in slots]
    for sequence in sequences:
        sequence.pages = [driver.free.pop()]
    parts = zip(sequences, slots, strict=True)
    plan = StepPlan([ScheduledSequence(sequence, 0, 9, slot, True) for sequence, slot in parts])
    driver.steps.append(driver.runner.submit(plan).result())

    assert pool.segments == [[(slot, 9) for slot in slots]]
    assert pool.calls == [
        (layer, *linear)
        for layer in range(2)
        for linear in (
            ("qkv_proj", 64, 128),
            ("o_proj", 64, 64),
            ("gate_up_proj", 64, 256),
            ("down_proj", 128, 64),
        )
    ]
    expected = reference(llama, [prompt(9)], 1)[0]
    for untouched in (base, composed):
        torch.testing.assert_close(driver.logprobs(untouched), expected.logprobs, rtol=0, atol=1e-4)
    assert (driver.logprobs(adapted) - expected.logprobs).abs().max() > 0.1


def test_a_step_of_the_base_model_alone_takes_no_delta(llama: Path) -> None:
    pool = ShiftingPool()
    driver = Driver(llama, lora_pool=pool)
    driver.run([driver.sequence(prompt(9))], 3)
    assert pool.segments == [[(NO_SLOT, 9)], [(NO_SLOT, 1)], [(NO_SLOT, 1)]]
    assert pool.calls == []
