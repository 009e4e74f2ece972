"""What a step on a GPU allocates that is launched kernel by kernel, against what was reserved at start."""

from dataclasses import replace
from functools import partial

import pytest

from allocations import allocated
from deltaplane_server.config import EngineConfig
from deltaplane_server.execution.memory import GIB, MemoryBudget, plan_memory
from deltaplane_server.models.config import DecoderConfig
from gpu_stand_in import (
    DTYPE,
    MAX_SEQS,
    MAX_TOKENS,
    MODEL_LEN,
    ROUND,
    SAMPLING,
    WITH_SIDE,
    Part,
    decodes,
    plan_of,
    stand_in,
    start,
)

MODELS = {
    "plain": ROUND,
    "many-heads": replace(ROUND, num_heads=32, num_kv_heads=8, hidden_size=512, intermediate_size=1700),
    "large-vocabulary": replace(ROUND, vocab_size=16_000),
    "wide-mlp": replace(ROUND, intermediate_size=1024),
}
LARGEST: list[list[Part]] = [
    decodes(MAX_SEQS, MODEL_LEN - 1),
    [Part(0, MAX_TOKENS)],
    [Part(MODEL_LEN - 6, 6)] * MAX_SEQS,
    [*decodes(MAX_SEQS - 1, MODEL_LEN - 1), Part(0, MAX_TOKENS - MAX_SEQS + 1)],
]


def workspace(model: DecoderConfig) -> int:
    config = EngineConfig("random", "random", max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS)
    budget = MemoryBudget(usable=64 * GIB, kv_fraction=1.0, kv_limit=GIB, in_torch=False)
    plan = plan_memory(config, model, budget, weight_bytes=0, adapter_bytes=0, dtype=DTYPE)
    return {share.purpose: share.nbytes for share in plan.shares}["workspace"]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_step_takes_more_than_was_reserved(model: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the largest takes a good part of it, so that it is no guess."""
    stand_in(monkeypatch)
    runner, most = start(model, with_graphs=False, with_lora=True), 0
    for parts in LARGEST:
        for number in range(len(SAMPLING)):
            plan = plan_of(parts, [WITH_SIDE], number)
            peak = max(allocated(partial(runner.submit, plan)))
            assert peak <= workspace(model), (parts, number)
            most = max(most, peak)
    assert most > 0.2 * workspace(model)
