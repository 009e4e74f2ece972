"""What is decided when a model is put onto its device. tests/gpu puts one onto a GPU."""

from dataclasses import replace

import pytest
import torch

from bench.decode import NoText
from bench.random_model import TINY, RandomWeights
from deltaplane_server.cli import argument_parser, server_config
from deltaplane_server.config import EngineConfig
from deltaplane_server.engine.api import GenerationRequest
from deltaplane_server.engine.engine import Engine
from deltaplane_server.execution import setup
from deltaplane_server.execution.graphs.step_graphs import graph_bytes
from deltaplane_server.execution.setup import set_up, uses_graphs
from deltaplane_server.execution.warm_up import warm_up
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = EngineConfig("random", "random", max_num_seqs=4, enable_lora=False, kv_cache_bytes=1 << 20)
EAGER = replace(CONFIG, enforce_eager=True)
LIMITS = SchedulerConfig.of(CONFIG, max_model_len=512, num_pages=1)


def test_only_a_gpu_has_graphs_and_none_where_they_are_forbidden() -> None:
    assert uses_graphs(CONFIG, CUDA)
    assert not uses_graphs(EAGER, CUDA)
    assert not uses_graphs(CONFIG, CPU)


def test_inputs_of_steps_have_room_for_the_padding_of_graphs() -> None:
    few = replace(CONFIG, max_num_batched_tokens=100)
    limits = SchedulerConfig.of(few, max_model_len=512, num_pages=1)
    assert setup._max_tokens(few, limits, CUDA) == 128
    assert setup._max_tokens(few, limits, CPU) == 100
    assert setup._max_tokens(replace(few, max_num_seqs=200), limits, CUDA) == 200
    long = replace(limits, max_num_batched_tokens=5000)
    assert setup._max_tokens(CONFIG, long, CUDA) == 5000


def test_the_flag_of_the_command_line() -> None:
    parse = argument_parser().parse_args
    assert not server_config(parse(["serve", "model"])).engine.enforce_eager
    assert server_config(parse(["serve", "model", "--enforce-eager"])).engine.enforce_eager


def test_graphs_take_memory_only_where_there_are_any() -> None:
    with_graphs, eager = (
        {
            share.purpose: share.nbytes
            for share in setup._cuda_shares(config, TINY, LIMITS, torch.float32, CUDA)
        }
        for config in (CONFIG, EAGER)
    )
    graphs = graph_bytes(
        TINY, CONFIG.max_num_seqs, LIMITS.max_step_tokens, CONFIG.page_size, torch.float32, with_lora=False
    )
    assert with_graphs == {**eager, "graphs": graphs}


@pytest.mark.parametrize("config", [CONFIG, EAGER])
def test_weights_are_whole_when_a_model_is_ready(config: EngineConfig) -> None:
    class Weights(RandomWeights):
        finished = 0

        def finish(self) -> None:
            self.finished += 1

    weights = Weights(TINY, torch.float32)
    set_up(config, TINY, weights, torch.float32, CPU)
    assert weights.finished == 1


@pytest.mark.parametrize(("adapter_pages", "num_pages"), [(None, 4 * 2), (12, 12), (2, 2)])
def test_the_device_has_the_pages_that_are_asked_for(adapter_pages: int | None, num_pages: int) -> None:
    config = replace(CONFIG, enable_lora=True, max_loras=4, max_lora_rank=16, adapter_pages=adapter_pages)
    execution = set_up(config, TINY, RandomWeights(TINY, torch.float32), torch.float32, CPU)
    assert (execution.pool.num_pages, execution.pool.num_slots) == (num_pages, 4)
    shares = {share.purpose: share.nbytes for share in execution.memory.shares}
    assert shares["adapter pages"] == num_pages * execution.pool.page_bytes


@pytest.mark.parametrize("enable_lora", [True, False])
def test_a_warm_up_leaves_a_model_that_answers_as_without_one(enable_lora: bool) -> None:
    config = replace(CONFIG, enable_lora=enable_lora)

    def tokens(warm: bool) -> list[int]:
        torch.manual_seed(0)
        execution = set_up(config, TINY, RandomWeights(TINY, torch.float32), torch.float32, CPU)
        if warm:
            warm_up(
                execution.runner,
                execution.pool if enable_lora else None,
                TINY.adapter_layout(),
                torch.float32,
                num_tokens=config.page_size,
                max_num_seqs=config.max_num_seqs,
            )
        engine = Engine(Scheduler(execution.scheduler), execution.runner, NoText(), max_waiting=1)
        stop = StopParams(max_tokens=8)
        engine.submit(GenerationRequest("one", [3, 1, 4], SamplingParams(temperature=0.0), stop))
        made: list[int] = []
        while len(made) < stop.max_tokens:
            made += [token for delta in engine.step() for token in delta.token_ids]
        return made

    assert tokens(warm=True) == tokens(warm=False)
