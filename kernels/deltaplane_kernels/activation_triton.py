"""The gated activation in Triton. Rounds where activation.py rounds."""

import triton
import triton.language as tl
from torch import Tensor

from deltaplane_kernels.overlap_triton import launch_options, let_next_start, wait_for_previous

_BLOCK = 1024


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """As activation.silu_mul, for an even number of columns.

    out: [T, I], contiguous; a new tensor where it is None.
    """
    num_tokens, columns = gate_up.shape
    size = columns // 2
    if out is None:
        out = gate_up.new_empty((num_tokens, size))
    if num_tokens:
        _silu_mul[(num_tokens, triton.cdiv(size, _BLOCK))](
            out, gate_up.contiguous(), SIZE=size, BLOCK=_BLOCK, num_warps=4, **launch_options(out.device)
        )
    return out


@triton.jit
def _silu_mul(out, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(up.dtype)
    tl.store(out + token * SIZE + columns, silu * up, mask=inside)
