"""The decode benchmark, on a tiny model on the CPU."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import decode, report
from bench.gpu_busy import busy_of
from bench.gpu_kernels import OTHER, KernelTime, group_of, kernels_per_step, short_name, table_rows
from bench.gpu_power import Power, gpu_power, power_of
from bench.gpu_trace import Span
from bench.random_model import LLAMA_3_8B, TINY, RandomWeights, random_adapter, step_bytes
from deltaplane_kernels.rank_pages import RankPageLayout, SliceRows

CPU = torch.device("cpu")


def test_measures_and_reports_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    results = decode.main(["--tiny", "--device", "cpu"])
    assert list(results) == ["2,0", "2,0 LoRA enabled", "3,2", "3,2 rank 8"]
    assert all(figures.step_ms > 0 and figures.prefill_ms > 0 for figures in results.values())
    written = json.loads((tmp_path / "decode-tiny.json").read_text())
    assert written["results"]["3,2"]["step_ms"] == results["3,2"].step_ms
    assert written["workload"]["output_tokens"] == 9
    assert "3,2 rank 8" in capsys.readouterr().out


def test_rows_may_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert list(decode.main(["--tiny", "--device", "cpu", "--rows", "2,0"])) == ["2,0", "2,0 LoRA enabled"]
    with pytest.raises(SystemExit, match="no row 5,5"):
        decode.main(["--tiny", "--device", "cpu", "--rows", "5,5"])


def test_without_a_gpu_only_the_tiny_model_runs() -> None:
    with pytest.raises(SystemExit, match="run it on a GPU machine, or with --tiny"):
        decode.main(["--device", "cpu"])


@pytest.mark.parametrize(
    ("batch", "adapters", "rank", "milliseconds"),
    [(1, 0, 0, 3.5), (64, 0, 0, 4.0), (256, 0, 0, 5.5), (64, 64, 16, 5.3), (64, 64, 8, 4.6)],
)
def test_bytes_of_a_step_of_llama_3_8b(batch: int, adapters: int, rank: int, milliseconds: float) -> None:
    nbytes = step_bytes(LLAMA_3_8B, torch.bfloat16, batch=batch, context=256, adapters=adapters, rank=rank)
    assert nbytes / decode.BYTES_PER_MS == pytest.approx(milliseconds, abs=0.06)


@pytest.mark.parametrize("rank", [1, 8, 12, 16])
def test_a_random_adapter_is_zero_above_its_rank(rank: int) -> None:
    adapter = random_adapter(TINY, rank, torch.float32, CPU)
    layout = RankPageLayout(TINY.adapter_layout())
    rows = torch.cat(list(layout.a(adapter.pages, 1, "qkv_proj")[:, 2]))
    assert [bool(row.any()) for row in rows] == [index < rank for index in range(len(rows))]
    columns = torch.cat(list(layout.b(adapter.pages, 0, "down_proj", 0)))
    assert [bool(row.any()) for row in columns] == [index < rank for index in range(len(columns))]
    assert adapter.rows == [[SliceRows(rank)] * 7] * 2


def test_random_weights_keep_the_variance_of_what_they_multiply() -> None:
    weights = RandomWeights(TINY, torch.float32)
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    matrix = weights.read_rows(*names, dtype=torch.float32, device=CPU)
    assert matrix.shape == (256, 64)
    assert matrix.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert weights.read_rows("model.norm.weight", dtype=torch.float32, device=CPU).eq(1).all()


NVIDIA_SMI = """#!{python}
import pathlib, sys, time
assert "--id=GPU-1234" in sys.argv and "--format=csv,noheader,nounits" in sys.argv, sys.argv
for look in range(40):
    print("1980, 120.50, 0x0000000000000000" if look < 8 else "1410, 694.25, 0x0000000000000004", flush=True)
pathlib.Path(sys.argv[0]).with_name("looked").touch()
time.sleep(600)
"""


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whose tools there is no more than a test puts there."""
    properties = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("PATH", str(tmp_path))


def put_nvidia_smi(folder: Path, program: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(program)
    path.chmod(0o755)


@pytest.fixture
def nvidia_smi(one_gpu: None, tmp_path: Path) -> None:
    put_nvidia_smi(tmp_path, NVIDIA_SMI.format(python=sys.executable))


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.timeout(30)
def test_a_run_that_fails_is_watched_no_longer() -> None:
    def run() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        gpu_power(run, CPU)


@pytest.mark.usefixtures("nvidia_smi")
def test_clock_and_power_are_those_while_something_runs(tmp_path: Path) -> None:
    """The first quarter of the looks is left out."""
    runs: list[float] = []

    def run() -> None:
        runs.append(time.monotonic())
        while not (tmp_path / "looked").exists():
            assert time.monotonic() < runs[0] + 30
            time.sleep(0.01)

    assert gpu_power(run, CPU) == Power(watts=694.25, mhz=1410, capped=1)
    assert len(runs) == 1


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("program", [None, "#!/bin/sh\necho Field is not a valid field to query.; exit 2\n"])
def test_what_no_nvidia_smi_tells_is_left_out(tmp_path: Path, program: str | None) -> None:
    if program is not None:
        put_nvidia_smi(tmp_path, program)
    runs: list[int] = []
    assert gpu_power(lambda: runs.append(1), CPU) is None
    assert runs == [1]


def test_power_is_a_mean_of_all_looks() -> None:
    lines = ["1980, 300.0, 0x0", "1500, 600.0, 0x4", "1500, 690.0, 0x24", "1620, 610.0, 0x20"]
    assert power_of(lines) == Power(watts=550, mhz=1650, capped=0.5)
    assert power_of(["1980, [N/A], 0x0"]) is None
    assert power_of([]) is None


def test_the_share_of_a_busy_gpu_is_that_of_the_time_something_runs() -> None:
    """Two kernels side by side count once; a short gap is a launch, a long one a wait."""
    spans = [(0, 40_000), (10_000, 50_000), (52_000, 60_000), (80_000, 100_000)]
    busy = busy_of([Span(*span, "kernel") for span in spans])
    assert busy.share == pytest.approx(1 - 22_000 / 100_000)
    assert busy.waited == pytest.approx(20_000 / 100_000)


NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
SPLIT_K = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(float*, int)"


@pytest.mark.parametrize(
    ("name", "group", "short"),
    [
        (NVJET, "products", NVJET),
        (SPLIT_K, "products", "splitKreduce_kernel"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop>(Params)", "products", "Kernel2"),
        ("few_rows_bfloat16", "products", "few_rows_bfloat16"),
        ("shrink_bfloat16_16", "LoRA shrink", "shrink_bfloat16_16"),
        ("expand_bfloat16", "LoRA expand", "expand_bfloat16"),
        ("_shrink", "LoRA shrink", "_shrink"),
        ("_decode", "attention", "_decode"),
        ("_rms_norm", "norms", "_rms_norm"),
        ("_rotate_and_write", "rotary and KV write", "_rotate_and_write"),
        ("_silu_mul", "activation", "_silu_mul"),
        ("_of_chunks", "sampling", "_of_chunks"),
        ("Memcpy HtoD (Pinned -> Device)", "copies", "Memcpy HtoD (Pinned -> Device)"),
        (
            "void at::native::(anonymous namespace)::indexSelectSmallIndex<long, unsigned int>(long*)",
            "copies",
            "indexSelectSmallIndex",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long> >(int)",
            OTHER,
            "vectorized_elementwise_kernel",
        ),
    ],
)
def test_kernels_have_a_group_and_a_short_name(name: str, group: str, short: str) -> None:
    assert (group_of(name), short_name(name)) == (group, short)


def test_kernels_are_summed_per_step_and_come_by_group() -> None:
    nanoseconds = {
        "_rms_norm": [2000] * 8,
        "_decode": [7_500_000] * 2,
        "nvjet_a": [4_000_000] * 2,
        "nvjet_b": [5_000_000, 3_000_000, 8_000_000],
    }
    spans, at = [], 1000
    for name, times in nanoseconds.items():
        for ns in times:
            spans.append(Span(at, at + ns, name))
            at += ns + 500  # of nothing
    assert kernels_per_step(spans, 2) == [
        KernelTime("products", "nvjet_b", 8.0, 1.5, 8.0),
        KernelTime("products", "nvjet_a", 4.0, 1.0, 4.0),
        KernelTime("attention", "_decode", 7.5, 1.0, 7.5),
        KernelTime("norms", "_rms_norm", 0.008, 4.0, 0.008),
    ]


def test_kernels_side_by_side_count_from_the_end_of_the_one_before() -> None:
    """One that starts early, one within it, and one after a gap."""
    spans = [
        Span(0, 10_000_000, "_decode"),
        Span(4_000_000, 16_000_000, "nvjet"),
        Span(11_000_000, 12_000_000, "shrink_bfloat16_16"),
        Span(20_000_000, 21_000_000, "_rms_norm"),
    ]
    assert {kernel.name: (kernel.ms, kernel.ran_ms) for kernel in kernels_per_step(spans, 1)} == {
        "_decode": (10.0, 10.0),
        "shrink_bfloat16_16": (2.0, 1.0),
        "nvjet": (4.0, 12.0),
        "_rms_norm": (1.0, 1.0),
    }


def test_a_table_of_kernels_sums_groups_and_all() -> None:
    kernels = [
        KernelTime("products", "nvjet_b", 4.0, 2.0, 5.0),
        KernelTime("products", "nvjet_a", 3.0, 1.0, 3.0),
        KernelTime("norms", "_rms_norm", 0.5, 5.0, 0.5),
    ]
    assert table_rows(kernels, 10.0) == [
        ["products", "7.000", "3.0", "2666.7"],
        ["  nvjet_b", "4.000", "2.0", "2500.0"],
        ["  nvjet_a", "3.000", "1.0", "3000.0"],
        ["norms", "0.500", "5.0", "100.0"],
        ["  _rms_norm", "0.500", "5.0", "100.0"],
        ["kernels in all", "7.500", "8.0", "1062.5"],
        ["of the step", "75.0 %", "", ""],
    ]


def test_the_gpu_is_not_watched_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    results = decode.main(["--tiny", "--device", "cpu", "--rows", "2,0", "--busy", "--kernels"])
    assert all(figures.busy is None and figures.kernels is None for figures in results.values())
