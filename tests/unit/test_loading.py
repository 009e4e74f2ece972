"""What is decided when a backend is loaded. tests/gpu loads one onto a GPU."""

from dataclasses import replace

import pytest
import torch

from bench.random_model import TINY
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_server import loading
from deltaplane_server.config import EngineConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = EngineConfig("tiny", "tiny", max_lora_rank=16)
PAGE_BYTES = RankPageLayout(TINY.adapter_layout()).page_bytes(torch.float32)


def test_a_gpu_leaves_the_cores_to_others_unless_it_is_told() -> None:
    assert loading._num_threads(CONFIG, CUDA) == 1
    assert loading._num_threads(replace(CONFIG, num_threads=3), CUDA) == 3
    assert loading._num_threads(replace(CONFIG, num_threads=3), CPU) == 3


def test_host_pages_are_for_adapters_on_a_gpu() -> None:
    assert loading._host_pages(CONFIG, TINY, torch.float32, CPU) is None
    assert loading._host_pages(replace(CONFIG, enable_lora=False), TINY, torch.float32, CUDA) is None


@pytest.mark.parametrize(
    ("changes", "field", "num_bytes"),
    [
        ({"max_cpu_loras_bytes": 1 << 60}, "max_cpu_loras_bytes", 1 << 60),
        ({"max_cpu_loras": 1 << 40}, "max_cpu_loras", (1 << 40) * 2 * PAGE_BYTES),
    ],
)
def test_a_host_cache_beyond_the_machine_is_refused(
    changes: dict[str, int], field: str, num_bytes: int
) -> None:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]  # both are numbers
    assert config.host_cache_bytes(PAGE_BYTES) == num_bytes
    with pytest.raises(InvalidArgumentError, match="are available; ask for less") as caught:
        loading._host_pages(config, TINY, torch.float32, CUDA)
    assert [violation.field for violation in caught.value.violations] == [field]
