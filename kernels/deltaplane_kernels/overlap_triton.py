"""Programmatic dependent launch of Triton kernels: a kernel starts while the one before it ends.

Every kernel of a decode step lets the next one start at once, and reads or writes nothing that others write
before all kernels ahead of it have ended. So the launch of a kernel, and what it can load of weights, hide
behind those before it: a decode step of Llama-3-8B with one row takes 4.50 ms on an H200 instead of 4.57.
Compute capability 9 has this; elsewhere, and in Triton's interpreter, kernels run one after the other.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of the launch of a kernel that calls let_next_start and wait_for_previous."""
    overlaps = device.type == "cuda" and _major(device) >= 9
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """The first thing that a kernel does."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Before it only what no kernel of the step writes may be read. Every program calls it, also one without
    work: that a kernel has ended must mean that all before it have."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
