"""The memory budget: who gets how much, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.config import EngineConfig
from deltaplane_server.execution.host_memory import available_memory
from deltaplane_server.execution.kv_cache import KVCache, kv_page_bytes
from deltaplane_server.execution.memory import (
    MemoryBudget,
    MemoryPlan,
    MemoryShare,
    memory_budget,
    plan_memory,
)
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.models.rope import Rope

CPU = torch.device("cpu")
MIB = 1 << 20
GIB = 1 << 30
ENGINE = EngineConfig(model="m", served_model_name="m", max_num_seqs=4, max_num_batched_tokens=64)
MODEL = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_model_len=250,
    rope=Rope((1.0,) * 8, 1.0),
    windows=(None,) * 4,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    eos_token_ids=frozenset(),
)
PAGE_BYTES = 4 * 2 * 2 * 16 * 16 * 4
HOST = MemoryBudget(usable=GIB, kv_fraction=0.5, kv_limit=256 * MIB, in_torch=True)
GPU = MemoryBudget(usable=GIB, kv_fraction=1.0, kv_limit=GIB, in_torch=False)


def plan(
    engine: EngineConfig = ENGINE, budget: MemoryBudget = HOST, model: DecoderConfig = MODEL
) -> MemoryPlan:
    return plan_memory(
        engine, model, budget, weight_bytes=100 * MIB, adapter_bytes=10 * MIB, dtype=torch.float32
    )


def shares(plan: MemoryPlan) -> dict[str, int]:
    return {share.purpose: share.nbytes for share in plan.shares}


def test_a_page_holds_the_keys_and_values_of_all_layers() -> None:
    assert kv_page_bytes(MODEL, 16, torch.float32) == PAGE_BYTES
    cache = KVCache(MODEL, num_pages=5, page_size=16, dtype=torch.bfloat16, device=CPU)
    assert cache.pages.nbytes == 5 * PAGE_BYTES // 2


def test_clearing_pages_leaves_the_others_alone() -> None:
    cache = KVCache(MODEL, num_pages=5, page_size=16, dtype=torch.float32, device=CPU)
    cache.pages.fill_(torch.nan)
    cache.clear([1, 3])
    cache.clear([])
    assert [bool(cache.pages[page].isnan().any()) for page in range(5)] == [True, False, True, False, True]
    assert cache.pages[[1, 3]].abs().sum() == 0


def test_by_default_all_sequences_may_reach_their_full_length() -> None:
    default = plan()
    assert default.num_kv_pages == 4 * 16
    assert shares(default)["KV pages"] == 64 * PAGE_BYTES


def test_what_else_the_device_needs_comes_before_kv_pages() -> None:
    engine = replace(ENGINE, max_num_seqs=64, enable_prefix_caching=True)
    others = (MemoryShare("graphs", 300 * MIB), MemoryShare("libraries", 200 * MIB))
    without, with_others = (
        plan_memory(engine, MODEL, GPU, weight_bytes=MIB, adapter_bytes=MIB, dtype=torch.float32, others=more)
        for more in ((), others)
    )
    assert with_others.nbytes <= GPU.usable
    assert shares(with_others)["graphs"] == 300 * MIB
    given_up = (without.num_kv_pages - with_others.num_kv_pages) * PAGE_BYTES
    assert given_up == pytest.approx(500 * MIB, abs=PAGE_BYTES)


def test_whole_prompts_need_more_workspace() -> None:
    chunked, whole = plan(), plan(replace(ENGINE, enable_chunked_prefill=False))
    assert shares(whole)["workspace"] > 2 * shares(chunked)["workspace"]


def test_only_a_cpu_needs_masks() -> None:
    long = replace(MODEL, max_model_len=100_000)
    assert shares(plan(budget=GPU, model=long))["workspace"] == shares(plan(budget=GPU))["workspace"]
    assert shares(plan(model=long))["workspace"] > shares(plan())["workspace"]


def test_shares_are_a_table_of_everything() -> None:
    default = plan()
    assert list(shares(default)) == ["weights", "KV pages", "adapter pages", "workspace"]
    assert shares(default)["weights"] == 100 * MIB
    assert shares(default)["adapter pages"] == 10 * MIB
    assert shares(default)["workspace"] > 0
    assert default.nbytes == sum(shares(default).values())


def test_a_prefix_cache_takes_all_it_is_given() -> None:
    cached = plan(replace(ENGINE, enable_prefix_caching=True))
    per_page = PAGE_BYTES + 2 * PAGE_BYTES // 4
    assert cached.num_kv_pages == 256 * MIB // per_page


def test_the_limit_of_the_budget_bounds_the_default() -> None:
    many = replace(ENGINE, max_num_seqs=10_000, enable_prefix_caching=True)
    assert plan(many).nbytes - plan(many).shares[3].nbytes <= (110 + 256) * MIB
    on_gpu = plan(replace(many, max_num_seqs=4), GPU)
    assert 0 <= GIB - on_gpu.nbytes < PAGE_BYTES


def test_scarce_memory_bounds_the_default() -> None:
    scarce = plan(replace(ENGINE, max_num_seqs=64), replace(HOST, usable=120 * MIB))
    assert 0 < scarce.num_kv_pages < 64 * 16
    assert scarce.nbytes <= 120 * MIB


def test_a_size_that_is_asked_for_is_kept_to() -> None:
    asked = plan(replace(ENGINE, kv_cache_bytes=10 * PAGE_BYTES + 1))
    assert asked.num_kv_pages == 10


@pytest.mark.parametrize("budget", [HOST, GPU])
def test_more_kv_than_memory_is_refused(budget: MemoryBudget) -> None:
    with pytest.raises(InvalidArgumentError, match="kv_cache_bytes: more KV than memory") as caught:
        plan(replace(ENGINE, kv_cache_bytes=2 * GIB), budget)
    assert "1.00 GiB are available" in caught.value.message
    assert "KV pages 2.00 GiB" in caught.value.message
    assert "\n" not in caught.value.message
    assert [v.field for v in caught.value.violations] == ["kv_cache_bytes"]


def test_less_kv_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=f"kv_cache_bytes: 100 bytes .* at least {PAGE_BYTES}"):
        plan(replace(ENGINE, kv_cache_bytes=100))


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"memory: .* 0\.10 GiB are available.* adapter_pages\)"):
        plan(budget=replace(HOST, usable=100 * MIB))


def test_windows_and_lengths_count_as_workspace() -> None:
    """A chunk's mask is one row a token and one column a key, for each kind of window."""
    one = shares(plan(model=replace(MODEL, max_model_len=10_000)))["workspace"]
    two = shares(plan(model=replace(MODEL, max_model_len=10_000, windows=(None, 8, None, 8))))["workspace"]
    assert two - one == 64 * 10_000 * 4


def test_the_budget_of_a_cpu_is_what_is_available() -> None:
    budget = memory_budget(ENGINE, CPU)
    assert budget.in_torch
    assert budget.kv_limit == GIB
    assert 0 < budget.usable <= available_memory() * 1.5


MEMINFO = "MemTotal: 2000 kB\nMemFree: 900 kB\nMemAvailable: 1000 kB\n"


def machine(root: Path, membership: str) -> tuple[Path, Path]:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(MEMINFO)
    (root / "proc" / "self" / "cgroup").write_text(membership)
    return root / "proc", root / "cgroup"


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content + "\n")


def test_without_limits_the_system_decides(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/a\n")
    group(cgroups / "a", memory__max="max", memory__current="5")
    assert available_memory(proc, cgroups) == 1000 * 1024


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    """File pages that nobody uses can be taken back, so they are not counted as used."""
    proc, cgroups = machine(tmp_path, "0::/a/b\n")
    group(
        cgroups / "a" / "b",
        memory__max="700000",
        memory__current="300000",
        memory__stat="inactive_file 50000",
    )
    assert available_memory(proc, cgroups) == 450_000


def test_the_limit_of_a_group_around_ours_counts(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/a/b\n")
    group(cgroups / "a" / "b", memory__max="700000", memory__current="1000")
    group(cgroups / "a", memory__max="500000", memory__current="200000")
    assert available_memory(proc, cgroups) == 300_000


def test_inside_a_container_the_root_is_our_group(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/not/visible/here\n")
    group(cgroups, memory__max="600000", memory__current="100000")
    assert available_memory(proc, cgroups) == 500_000


def test_first_version_control_groups(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "3:cpu:/x\n2:memory:/a\n0::/\n")
    group(
        cgroups / "memory" / "a",
        memory__limit_in_bytes="800000",
        memory__usage_in_bytes="300000",
        memory__stat="total_inactive_file 100000",
    )
    assert available_memory(proc, cgroups) == 600_000


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n")
    group(cgroups, memory__max="1000", memory__current="2000")
    assert available_memory(proc, cgroups) == 0
