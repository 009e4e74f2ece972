"""The expand that goes on to the residual stream and its norm: csrc/expand_norm.cuh and its launches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.cuda_module import CudaKernel, CudaModule
from deltaplane_kernels.lora_launch import Launch, NormLaunch
from deltaplane_kernels.norm import NormWeight, check_weight

MAX_ROWS = 96
"""Most rows of a step that are computed so: each reads B by itself, where a tile of expand reads it once. Of
Llama-3-8B and rank 16 on an H200, 64 rows of 64 adapters take 6.2 us instead of 8.6, 64 of one 4.9 instead of
8.0, but 256 rows of 64 adapters 15.8 instead of 12.1."""

FEW_ROWS = 32
"""Rows up to which a cluster has MAX_CLUSTER blocks; more fill a GPU with CLUSTER each."""

# As in elements.cuh and expand_norm.cuh.
VECTOR = 8
MAX_CLUSTER = 8
MAX_THREADS = 512

CLUSTER = 4
MAX_WIDTH = CLUSTER * MAX_THREADS * VECTOR


@dataclass(frozen=True, slots=True)
class Cluster:
    """How a row is divided among `blocks` of `threads`, each with `columns` of it."""

    blocks: int
    columns: int
    threads: int


def plan_cluster(num_rows: int, width: int) -> Cluster:
    """Of each of num_rows rows of `width` columns, of which a thread takes VECTOR."""
    blocks = MAX_CLUSTER if num_rows <= FEW_ROWS else CLUSTER
    columns = -(-width // (blocks * VECTOR)) * VECTOR
    return Cluster(blocks, columns, threads=-(-columns // (32 * VECTOR)) * 32)


class ExpandAddRmsNorm:
    """The kernels of one dtype, for linears of one slice."""

    def __init__(self, module: CudaModule, dtype: str, widths: Mapping[str, int]) -> None:
        """module: of a GPU of compute capability 9 or newer. dtype: "bfloat16" or "float16".
        widths: outputs of each linear of one slice; those above MAX_WIDTH are left out."""
        self._widths = {linear: width for linear, width in widths.items() if width <= MAX_WIDTH}
        clusters = {plan_cluster(rows, width) for width in self._widths.values() for rows in (1, MAX_ROWS)}
        self._kernels = {cluster: _kernel(module, dtype, cluster) for cluster in clusters}

    def takes(self, linear: str, num_rows: int) -> bool:
        return linear in self._widths and num_rows <= MAX_ROWS

    def launch(
        self,
        op: Launch,
        residual: Tensor,
        weight: NormWeight,
        eps: float,
        *,
        stream: int,
        operands: Callable[[], str],
    ) -> Tensor:
        """Starts a cluster for each row of `residual`; returns the norm.

        op: with all that expand reads.
        Errors: RuntimeError where weight does not fit; KernelError.
        """
        num_rows, width = residual.shape
        out = torch.empty_like(residual)
        cluster = plan_cluster(num_rows, width)
        launch = NormLaunch(
            op=op,
            residual=residual.data_ptr(),
            out=out.data_ptr(),
            cluster=cluster.blocks,
            block_columns=cluster.columns,
            eps=eps,
        )
        _set_weight(launch, weight, residual)
        self._kernels[cluster].launch(num_rows * cluster.blocks, stream, launch, operands)
        return out


def _kernel(module: CudaModule, dtype: str, cluster: Cluster) -> CudaKernel:
    return module.kernel(f"expand_add_rms_norm_{dtype}", cluster.threads, cluster=cluster.blocks)


def _set_weight(launch: NormLaunch, weight: NormWeight, residual: Tensor) -> None:
    base, own = check_weight(weight, *residual.shape)
    if base.dtype != residual.dtype or base.data_ptr() % 16:
        raise RuntimeError(
            f"weight of {base.dtype} does not fit rows of {residual.dtype}, or does not start at a multiple "
            "of 16 bytes"
        )
    launch.weight = base.data_ptr()
    if own is not None:
        launch.weight_slots = own.slots.data_ptr()
        launch.weight_offsets = own.offsets.data_ptr()
        launch.weight_offset_stride = own.offsets.stride(0)
        launch.weight_pool = own.pool.data_ptr()
