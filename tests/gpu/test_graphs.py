"""CUDA graphs of steps: what they take. test_engine compares what they compute."""

import gc
from dataclasses import replace

import pytest
import torch

from bench.random_model import LLAMA_3_8B, RandomWeights
from deltaplane_kernels.lora import RankPagePool
from deltaplane_server.execution.graphs.graph_set import GraphInputs
from deltaplane_server.execution.graphs.step_graphs import StepGraphs, max_graph_tokens, tensor_bytes
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.models.decoder import Decoder

GPU = torch.device("cuda")
MODEL = replace(LLAMA_3_8B, num_layers=2, windows=(None,) * 2, vocab_size=32_000)
LIBRARIES = 128 << 20
"""Workspaces of cuBLAS for the stream of a capture, and what allocations are rounded up by; setup counts them
apart from graphs."""


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize(("max_num_seqs", "max_step_tokens"), [(64, 512), (256, 1024)])
def test_tensors_of_graphs_take_no_more_memory_than_is_counted(
    max_num_seqs: int, max_step_tokens: int, with_lora: bool
) -> None:
    decoder = Decoder(MODEL, RandomWeights(MODEL, torch.bfloat16), torch.bfloat16, GPU)
    kv_cache = KVCache(MODEL, num_pages=1, page_size=16, dtype=torch.bfloat16, device=GPU)
    most = max_graph_tokens(max_num_seqs, max_step_tokens)
    pool = None
    if with_lora:
        pool = RankPagePool(MODEL.adapter_layout(), 2, 1, torch.bfloat16, GPU, max_tokens=most)
    inputs = GraphInputs(decoder, kv_cache, TokenFeed(most, most, GPU), pool)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(GPU)
    graphs = StepGraphs.capture(inputs, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens)
    taken = torch.cuda.memory_reserved(GPU) - before
    del graphs
    counted = tensor_bytes(MODEL, max_num_seqs, max_step_tokens, 16, torch.bfloat16)
    assert 0 < taken <= counted + LIBRARIES
