"""What CUDA graphs are made for, and what they take. tests/gpu runs them."""

from dataclasses import replace

import pytest
import torch

from bench.random_model import LLAMA_3_8B
from deltaplane_kernels import attention_index
from deltaplane_kernels.attention_index import IndexBuffer
from deltaplane_kernels.lora_tiles import tile_rows
from deltaplane_server.execution.graphs.decode_graphs import batch_sizes
from deltaplane_server.execution.graphs.graph_set import smallest_above
from deltaplane_server.execution.graphs.prompt_graphs import step_sizes
from deltaplane_server.execution.graphs.step_graphs import (
    _attention_bytes,
    graph_bytes,
    max_graph_tokens,
)

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 4)),
        (5, (1, 2, 4, 8)),
        (17, (1, 2, 4, 8, 16, 24)),
        (24, (1, 2, 4, 8, 16, 24)),
        (256, (1, 2, 4, *range(8, 257, 8))),
        (1000, (1, 2, 4, *range(8, 257, 8))),
    ],
)
def test_batch_sizes_reach_the_most_sequences(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("max_step_tokens", "sizes"),
    [
        (1, (64,)),
        (64, (64,)),
        (65, (64, 128)),
        (512, (64, 128, 192, 256, 320, 384, 512)),
        (513, (64, 128, 192, 256, 320, 384, 512, 640)),
        (8192, (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024)),
    ],
)
def test_step_sizes_reach_the_most_tokens(max_step_tokens: int, sizes: tuple[int, ...]) -> None:
    assert step_sizes(max_step_tokens) == sizes
    assert max_graph_tokens(1, max_step_tokens) == sizes[-1]


@pytest.mark.parametrize("sizes", [batch_sizes(256), step_sizes(1024)], ids=["decodes", "prompts"])
def test_a_graph_and_the_steps_that_it_holds_have_adapters_in_tiles_of_one_size(
    sizes: tuple[int, ...],
) -> None:
    """The kernel is chosen at capture, by the graph's rows, and the tiles are made by the step's."""
    for num_rows in range(1, sizes[-1] + 1):
        size = smallest_above(sizes, num_rows)
        assert size >= num_rows
        assert tile_rows(size) == tile_rows(num_rows)


def test_padding_costs_little() -> None:
    """At most 64 rows, which is the least that a product takes; of long steps, at most a third."""
    sizes = step_sizes(1024)
    padding = {n: smallest_above(sizes, n) - n for n in range(1, 1025)}
    assert max(padding[n] for n in range(1, 385)) < 64
    assert max(padding[n] / n for n in range(385, 1025)) < 1 / 3


def test_graphs_of_an_8b_model_take_a_few_gigabytes_at_most() -> None:
    def most(max_num_seqs: int, max_step_tokens: int, *, with_lora: bool = True) -> int:
        return graph_bytes(LLAMA_3_8B, max_num_seqs, max_step_tokens, 16, torch.bfloat16, with_lora=with_lora)

    assert GIB < most(256, 1024) < 2 * GIB
    assert 0 < most(256, 1024, with_lora=False) < most(256, 1024)
    assert most(256, 1024) == most(256, 8192)
    assert most(8, 64) < GIB / 2


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (24, 24), (256, 256), (1024, 64), (512, 512)])
def test_the_room_of_attention_is_counted(
    rows: int, sequences: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs of 160 multiprocessors."""
    monkeypatch.setattr(attention_index, "processors", lambda device: 160)
    buffer = IndexBuffer(
        rows,
        sequences,
        LLAMA_3_8B.max_model_len // 16,
        decodes_alone=rows == sequences,
        page_size=16,
        num_kv_heads=num_kv_heads,
        device=CPU,
    )
    partials = buffer.index(rows).workspace.partials(LLAMA_3_8B.num_heads, LLAMA_3_8B.head_dim)
    taken = sum(tensor.nbytes for tensor in (buffer._block, buffer._workspace.counters, *partials))
    model = replace(LLAMA_3_8B, num_kv_heads=num_kv_heads)
    assert taken <= _attention_bytes(model, rows, sequences + 1, 16) < taken + 80e6
