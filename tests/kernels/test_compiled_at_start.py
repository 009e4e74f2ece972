"""No step compiles a kernel: the server's start has met all that a step launches, whatever its numbers are.

Triton compiles a kernel anew for other constants, other dtypes, pointers or integers that are no longer
multiples of 16, an integer that is 1. Kernels of LoRA in the layers are not Triton's: they are compiled for
all ranks when a pool is made.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deltaplane_kernels import argmax_triton
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.scheduling.plan import NO_SLOT
from gpu_stand_in import (
    MAX_SEQS,
    MODEL_LEN,
    ODD,
    PLAIN,
    ROUND,
    WITH_SIDE,
    Key,
    Part,
    compute,
    decodes,
    plan_of,
    stand_in,
    start,
)

ROWS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 133, 256, 300, 1000, 2000)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Key]:
    return stand_in(monkeypatch)


def shapes() -> Iterator[list[Part]]:
    """Decodes, prompts and both, of all numbers; contexts short and long."""
    for rows in ROWS:
        if rows <= MAX_SEQS:
            yield decodes(rows, 1)
            yield decodes(rows, MODEL_LEN - 1)
        yield [Part(0, rows)]
        yield [Part(MODEL_LEN - rows, rows, samples=False)]
        if 1 < rows < MAX_SEQS:
            yield [*decodes(rows // 2, 700), Part(5, rows - rows // 2), Part(0, 1700, samples=False)]
            yield [*decodes(rows - 1, 3), *[Part(0, 2)] * min(rows // 3, MAX_SEQS - rows), Part(0, 31)]


def kernels(keys: set[Key]) -> set[str]:
    return {name for name, _ in keys}


ALL_KERNELS = {
    "activation_triton._silu_mul",
    "argmax_triton._of_chunks",
    "argmax_triton._of_rows",
    "attention_triton._decode",
    "attention_triton._prefill",
    "norm_triton._rms_norm",
    "rotary_triton._rotary_factors",
    "rotary_triton._rotate_and_write",
    "sampling_triton._draw",
    "sampling_triton._measure",
    "side_triton._embed",
    "side_triton._expand",
    "side_triton._shrink",
}
IN_GRAPHS = {name for name in ALL_KERNELS if name.startswith("argmax")}
"""Without graphs the likeliest token is drawn like others."""

VARIANTS = {name: 1 for name in ALL_KERNELS - IN_GRAPHS if not name.startswith("side_")} | {
    "attention_triton._decode": 4,  # with a window and without, of few decodes and of many
    "attention_triton._prefill": 2,  # with a window and without
    "norm_triton._rms_norm": 3,  # of the residual stream, at the end of it, and of heads
}
VARIANTS_WITH_SIDE = {name: 1 for name in ALL_KERNELS if name.startswith("side_")} | {
    "norm_triton._rms_norm": 5,
}
"""By whether the place of a norm among the adapter's is a multiple of 16 bytes, too."""


@pytest.mark.parametrize("model", [ROUND, ODD], ids=["round", "odd"])
@pytest.mark.parametrize("with_graphs", [True, False], ids=["graphs", "eager"])
def test_no_step_meets_a_kernel_that_the_start_has_not(
    model: DecoderConfig, with_graphs: bool, launched: set[Key]
) -> None:
    runner = start(model, with_graphs=with_graphs, with_lora=True)
    compiled = set(launched)
    assert kernels(compiled) == ALL_KERNELS - (set() if with_graphs else IN_GRAPHS)
    of_steps: set[Key] = set()
    for number, parts in enumerate(shapes()):
        for slots in ([NO_SLOT], [PLAIN], [WITH_SIDE], [NO_SLOT, WITH_SIDE, PLAIN]):
            launched.clear()
            compute(runner, plan_of(parts, slots, number))
            assert launched <= compiled, (parts, slots, launched - compiled)
            of_steps |= launched
    assert kernels(of_steps) == ALL_KERNELS - IN_GRAPHS


@pytest.mark.parametrize("model", [ROUND, ODD], ids=["round", "odd"])
def test_kernels_differ_by_what_a_model_is_and_by_whether_decodes_fill_the_device(
    model: DecoderConfig, launched: set[Key]
) -> None:
    """Of the base model alone, and of rows with parts outside the layers."""
    runner = start(model, with_graphs=False, with_lora=True)
    for slots, variants in ((NO_SLOT, VARIANTS), (WITH_SIDE, VARIANTS | VARIANTS_WITH_SIDE)):
        launched.clear()
        for number, parts in enumerate(shapes()):
            compute(runner, plan_of(parts, [slots], number))
        assert Counter(name for name, _ in launched) == variants


def test_a_server_without_adapters(launched: set[Key]) -> None:
    runner = start(ROUND, with_graphs=False, with_lora=False)
    compiled = set(launched)
    for number, parts in enumerate(shapes()):
        compute(runner, plan_of(parts, [NO_SLOT], number))
    assert launched == compiled


def test_other_alignment_other_integers_and_other_dtypes_are_other_kernels(launched: set[Key]) -> None:
    """What would be compiled anew on the way is noted, where there is such."""

    def number_of_kernels(*inputs: Tensor) -> int:
        launched.clear()
        for x in inputs:
            argmax_triton.argmax(x, torch.empty(len(x), dtype=torch.int64))
        return len({key for name, key in launched if name == "argmax_triton._of_chunks"})

    x = torch.zeros(3, 64)
    assert number_of_kernels(x, torch.zeros(700, 64)) == 1
    assert number_of_kernels(x, torch.zeros(193)[1:].view(3, 64)) == 2
    assert number_of_kernels(x, torch.zeros(3, 63), torch.zeros(3, 1)) == 3
    assert number_of_kernels(x, x.half()) == 2
