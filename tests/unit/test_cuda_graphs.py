"""What CUDA graphs are made for, and what they take. tests/gpu runs them."""

import pytest
import torch

from bench.random_model import LLAMA_3_8B
from deltaplane_server.execution.cuda_graphs import batch_sizes, graph_bytes

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


def test_graphs_of_an_8b_model_take_a_few_gigabytes_at_most() -> None:
    most = graph_bytes(LLAMA_3_8B, 256, 16, torch.bfloat16, with_lora=True)
    assert GIB < most < 3 * GIB
    without = graph_bytes(LLAMA_3_8B, 256, 16, torch.bfloat16, with_lora=False)
    assert 0 < without < most
    assert graph_bytes(LLAMA_3_8B, 8, 16, torch.bfloat16, with_lora=True) < GIB / 2
