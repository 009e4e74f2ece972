"""What a server on a CPU allocates, measured, against what it reserved at start."""

import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from allocations import allocated
from bench.decode import NoText
from bench.random_model import TINY, RandomWeights
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_server.adapters.packing import PackedAdapter
from deltaplane_server.config import EngineConfig
from deltaplane_server.engine.api import FinishReason, GenerationRequest
from deltaplane_server.engine.engine import Engine
from deltaplane_server.execution.setup import Execution, set_up
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.scheduling.lease import AdapterUid, Slots
from deltaplane_server.scheduling.plan import NO_SLOT, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence
from fake_leases import FakeAdapters
from lora_cases import make_adapter
from side_cases import make_side_adapter, no_rows, outside_of, side_layout

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SEQUENCES, STEP_TOKENS, RANK = 8, 256, 16
CONFIG = EngineConfig(
    "random",
    "random",
    max_num_seqs=SEQUENCES,
    max_num_batched_tokens=STEP_TOKENS,
    max_loras=4,
    max_lora_rank=RANK,
    adapter_pages=128,
)
LONG = replace(TINY, max_model_len=1024)
MODELS = {
    "plain": LONG,
    "windows": replace(LONG, windows=(None, 40)),
    "many-query-heads": replace(LONG, num_heads=16, num_kv_heads=1, qk_norm=True),
    "large-vocabulary": replace(LONG, vocab_size=16_000),
    "wide-mlp": replace(LONG, intermediate_size=2048),
}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN, ANOTHER, DORA, SIDE = range(4)
BLEND = ((PLAIN, 0.5), (ANOTHER, -1.5))
MIXES: list[list[Slots]] = [[NO_SLOT], [PLAIN], [DORA], [SIDE], [BLEND], [NO_SLOT, PLAIN, DORA, SIDE, BLEND]]
"""Slots that the sequences of a step take in turn."""

GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(temperature=50.0)
ALL_PARAMS = SamplingParams(
    temperature=50.0,
    top_k=100_000,
    top_p=0.99999,
    min_p=1e-6,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={3: 1.0},
    logprobs=20,
)
"""So hot that nearly all of a vocabulary may be drawn."""


def adapters(model: DecoderConfig, dtype: torch.dtype) -> list[PackedAdapter]:
    """By slot, of the highest rank: two plain ones, one with DoRA and biases, one with all that there is
    outside the layers."""
    layout = model.adapter_layout()
    outside = outside_of(layout)
    ranked = [
        make_adapter(layout, RANK, seed=0),
        make_adapter(layout, RANK, seed=1),
        make_adapter(layout, RANK - 2, gains=MODULES, biases=MODULES),
    ]
    side = make_side_adapter(outside, head=RANK, embedding=RANK, table=True, norms=tuple(outside.norms))
    return [
        *(PackedAdapter(one.host_pages(dtype, 0.0), one.rows, read_ms=0.0, pack_ms=0.0) for one in ranked),
        PackedAdapter(
            side.host_pages(side_layout(layout), dtype),
            no_rows(layout),
            read_ms=0.0,
            pack_ms=0.0,
            side=side.shape,
        ),
    ]


def load(execution: Execution, packed: Sequence[PackedAdapter]) -> None:
    first = 0
    for slot, adapter in enumerate(packed):
        execution.pool.copy_in(slot, range(first, first + len(adapter.pages)), adapter)
        first += len(adapter.pages)


def serve(model: DecoderConfig, dtype: torch.dtype) -> Execution:
    torch.manual_seed(0)
    execution = set_up(CONFIG, model, RandomWeights(model, dtype), dtype, CPU)
    load(execution, adapters(model, dtype))
    return execution


def reserved(execution: Execution, purpose: str) -> int:
    return {share.purpose: share.nbytes for share in execution.memory.shares}[purpose]


def largest_steps(max_model_len: int) -> Iterator[list[tuple[int, int]]]:
    """(start, tokens) of each sequence: decodes, prompts, chunks after a long context, and both."""
    chunk, share = STEP_TOKENS - SEQUENCES + 1, STEP_TOKENS // SEQUENCES
    decode = (max_model_len - 1, 1)
    yield [decode] * SEQUENCES
    yield [(0, STEP_TOKENS)]
    yield [(0, share)] * SEQUENCES
    yield [(max_model_len - STEP_TOKENS, STEP_TOKENS)]
    yield [(max_model_len - share, share)] * SEQUENCES
    yield [*[decode] * (SEQUENCES - 1), (max_model_len - chunk, chunk)]


def plan_of(
    parts: Sequence[tuple[int, int]], slots: Sequence[Slots], sampling: SamplingParams, model: DecoderConfig
) -> StepPlan:
    """Each sequence has pages of its own."""
    pages_of_each = model.max_model_len // CONFIG.page_size
    stop = StopParams(max_tokens=9, min_tokens=4, eos_token_ids=frozenset({1, 2}))
    scheduled = []
    for number, (start, num_tokens) in enumerate(parts):
        tokens = [(number + 7 * position) % model.vocab_size for position in range(start + num_tokens)]
        pages = list(range(number * pages_of_each, (number + 1) * pages_of_each))
        sequence = TokenSequence(number, "", 0, tokens, len(tokens) - 1, sampling, stop, pages=pages)
        slot = slots[number % len(slots)]
        scheduled.append(ScheduledSequence(sequence, start, num_tokens, slot, samples=True))
    return StepPlan(scheduled, sum(num_tokens == 1 for _, num_tokens in parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_step_takes_more_than_was_reserved(model: DecoderConfig, dtype: torch.dtype) -> None:
    """And the largest takes a good part of it, so that it is no guess."""
    execution, most = serve(model, dtype), 0
    workspace = reserved(execution, "workspace")
    of_the_base: list[tuple[list[Slots], SamplingParams]] = [([NO_SLOT], GREEDY), ([NO_SLOT], HOT)]
    for parts in largest_steps(model.max_model_len):
        for slots, sampling in [*of_the_base, *((mix, ALL_PARAMS) for mix in MIXES)]:
            plan = plan_of(parts, slots, sampling, model)
            peak = max(allocated(partial(execution.runner.submit, plan)))
            assert peak <= workspace, (parts, slots, sampling)
            most = max(most, peak)
    assert most > 0.2 * workspace


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mask_of_a_chunk_after_a_long_context_was_reserved(dtype: torch.dtype) -> None:
    """Where there are few sequences, the most of a step is that."""
    model = replace(TINY, max_model_len=8192)
    config = replace(CONFIG, max_num_seqs=1, enable_lora=False)
    execution = set_up(config, model, RandomWeights(model, dtype), dtype, CPU)
    plan = plan_of([(8192 - STEP_TOKENS, STEP_TOKENS)], [NO_SLOT], GREEDY, model)
    peak, workspace = max(allocated(partial(execution.runner.submit, plan))), reserved(execution, "workspace")
    assert 0.2 * workspace < peak <= workspace


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_take_no_more_than_was_reserved(dtype: torch.dtype) -> None:
    """In a pool that is full of them."""
    packed = adapters(LONG, dtype)
    num_pages = sum(len(adapter.pages) for adapter in packed)
    config = replace(CONFIG, adapter_pages=num_pages)
    execution = set_up(config, LONG, RandomWeights(LONG, dtype), dtype, CPU)
    held = allocated(lambda: load(execution, packed))
    matrices = reserved(execution, "adapter matrices")
    assert reserved(execution, "adapter pages") == num_pages * packed[0].pages[0].nbytes
    assert matrices == num_pages * RankPageLayout(LONG.adapter_layout()).page_bytes(torch.float32)
    assert 0.2 * matrices < held[-1] <= matrices
    assert max(held) <= matrices + reserved(execution, "workspace")


def answer(execution: Execution, seed: int) -> None:
    """Random requests, a few at a time, of the base model, of adapters and of a blend; some are aborted."""
    rng = random.Random(seed)
    engine = Engine(Scheduler(execution.scheduler), execution.runner, NoText(), max_waiting=100)
    leases = FakeAdapters(num_slots=4)
    for version in range(1, 5):
        leases.load(version)
    uids: list[AdapterUid] = [0, 1, 2, 3, 4, ((1, 0.5), (2, -1.5))]
    left = 0
    for number in range(40):
        prompt = [rng.randrange(TINY.vocab_size) for _ in range(rng.choice([1, 15, 33, 300]))]
        uid, sampling = rng.choice(uids), rng.choice([GREEDY, HOT, ALL_PARAMS])
        engine.submit(
            GenerationRequest(
                str(number),
                prompt,
                replace(sampling, seed=number),
                StopParams(max_tokens=rng.randrange(1, 6)),
                lease=leases.lease(uid) if uid else None,
            )
        )
        left += 1
        if rng.random() < 0.2:
            engine.abort(str(rng.randrange(number + 1)))
        while left > 12 or (left and number == 39):
            for delta in engine.step():
                left -= delta.finish is not None
                assert delta.finish is None or delta.finish.reason is not FinishReason.ERROR
    engine.check_integrity()
    del engine
    gc.collect()


def storages() -> set[int]:
    """Where the storages of all tensors lie, but of weights in a layout of oneDNN's."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout is torch.strided}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_serving_leaves_the_memory_that_there_is(dtype: torch.dtype) -> None:
    """Nothing is held longer than its request, and pages, pool and staging stay where they are."""
    execution = serve(LONG, dtype)
    answer(execution, seed=0)
    before = storages()
    held = allocated(partial(answer, execution, seed=1))
    assert max(held) > 0
    assert held[-1] == 0
    assert storages() == before
