"""Clock and power of a GPU while something runs, as nvidia-smi tells them.

At the limit of its power a GPU lowers its clock: kernels then take as long as their energy over that power.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_FIELDS = "clocks.sm,power.draw.instant,clocks_throttle_reasons.active"
_POWER_CAP = 0x4
"""Among the reasons: the limit of the power that software has set, as is by default."""

_EVERY_MS = 50


@dataclass(frozen=True)
class Power:
    """Means. mhz: of the multiprocessors' clock. capped: the share of the time in which power bounds it."""

    watts: float
    mhz: float
    capped: float


def gpu_power(run: Callable[[], object], device: torch.device, *, skip: float = 0.25) -> Power | None:
    """Runs it and watches the GPU meanwhile. skip: the part of the time that does not count: a run's prefill.

    None where nvidia-smi is missing or does not answer. Watching may cost the run a little.
    """
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={_FIELDS}", f"--loop-ms={_EVERY_MS}"]
    try:
        watcher = subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True
        )
    except OSError:
        run()
        return None
    with watcher:
        assert watcher.stdout is not None
        try:
            watcher.stdout.readline()  # it watches
            run()
        finally:
            watcher.terminate()
        lines = watcher.stdout.read().splitlines()
    return power_of(lines[int(skip * len(lines)) :])


def power_of(lines: Sequence[str]) -> Power | None:
    """lines: what nvidia-smi has written: MHz, W and reasons of each look. None where it could not say."""
    try:
        looks = [line.split(",") for line in lines]
        clocks = [float(mhz) for mhz, _, _ in looks]
        watts = [float(draw) for _, draw, _ in looks]
        capped = [bool(int(reasons, 16) & _POWER_CAP) for _, _, reasons in looks]
    except ValueError:
        return None
    if not looks:
        return None
    return Power(sum(watts) / len(looks), sum(clocks) / len(looks), sum(capped) / len(looks))
