"""Machine code on a GPU: loading it, and launching its kernels on torch's current stream."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from deltaplane_kernels.nvrtc import architecture, compile_cubin


class KernelError(RuntimeError):
    """A CUDA call failed; the message names the kernel, its operands and its launch."""


@cache
def has_bulk_copies(device: torch.device, shared_bytes: int) -> bool:
    """Whether a GPU copies matrices by pieces (csrc/bulk_copies.cuh), which takes compute capability 9, and
    gives one block so much shared memory for them. Errors: KernelError."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    status, most = driver.cuDeviceGetAttribute(attribute, device.index or 0)
    check(status, f"asking for the shared memory of {device}")
    return int(most) >= shared_bytes


def load_module(source: Path, device: torch.device) -> "CudaModule":
    """A CUDA C++ file, compiled for the device. Errors: CompileError, KernelError."""
    capability = torch.cuda.get_device_capability(device)
    return CudaModule(compile_cubin(source, architecture(*capability)), device)


class CudaModule:
    """A loaded cubin. It lives as long as the process, as compiled kernels do."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        """Errors: KernelError where the driver refuses the cubin."""
        self.device = device
        self._properties = torch.cuda.get_device_properties(device)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the thread's own
            status, self._module = driver.cuModuleLoadData(cubin)
        self._shared_bytes: dict[str, int] = {}
        check(status, f"loading {len(cubin)} bytes of machine code on {device}")

    def kernel(self, name: str, block: int, *, shared_bytes: int = 0, cluster: int = 1) -> "CudaKernel":
        """An extern "C" kernel of the module, launched with `block` threads a block.

        shared_bytes: of shared memory for a block, beside what the kernel declares.
        cluster: blocks that run side by side and reach each other's shared memory, 8 at most; more than 1
            need compute capability 9.
        """
        status, function = driver.cuModuleGetFunction(self._module, name.encode())
        check(status, f"finding kernel {name}")
        if shared_bytes > self._shared_bytes.get(name, 0):  # it is the function's, for all its kernels
            self._shared_bytes[name] = shared_bytes
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuFuncSetAttribute(function, attribute, shared_bytes)
            check(status, f"{shared_bytes} bytes of shared memory for kernel {name}")
        attributes = []
        if self._properties.major >= 9:
            attributes.append(_programmatic_launch())
        if cluster > 1:
            attributes.append(_clusters_of(cluster))
        resident_blocks = self._resident_blocks(name, function, block, shared_bytes, cluster)
        return CudaKernel(name, function, block, shared_bytes, resident_blocks, attributes)

    def _resident_blocks(self, name: str, function: Any, block: int, shared_bytes: int, cluster: int) -> int:
        if cluster > 1:  # they lie within parts of a GPU whose sizes differ
            config = _config(cluster, block, shared_bytes, [_clusters_of(cluster)])
            status, clusters = driver.cuOccupancyMaxActiveClusters(function, config)
            resident_blocks = int(clusters) * cluster
        else:
            status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block, shared_bytes)
            resident_blocks = int(blocks) * self._properties.multi_processor_count
        check(status, f"occupancy of kernel {name} at {block} threads a block, {cluster} blocks a cluster")
        return resident_blocks


class CudaKernel:
    """A kernel that takes one structure by value.

    resident_blocks: blocks that the GPU holds at once.
    attributes: of each launch. From compute capability 9 on a kernel may start before the one ahead of it in
        its stream has ended (programmatic dependent launch). The kernel itself waits for that one
        (griddepcontrol.wait) before it touches what that one reads or writes.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        block: int,
        shared_bytes: int,
        resident_blocks: int,
        attributes: list[driver.CUlaunchAttribute],
    ) -> None:
        self.name = name
        self.resident_blocks = resident_blocks
        self._function = function
        self._block = block
        self._shared_bytes = shared_bytes
        self._attributes = attributes
        self._configs: dict[int, driver.CUlaunchConfig] = {}

    def launch(
        self, grid: int, stream: int, parameters: ctypes.Structure, operands: Callable[[], str]
    ) -> None:
        """Starts `grid` blocks on a CUDA stream; `parameters` is copied before this returns.

        operands: what an error says of the data; asked for only then.
        Errors: KernelError, also for a fault of an earlier kernel that the driver reports now.
        """
        config = self._configs.get(grid)
        if config is None:
            config = _config(grid, self._block, self._shared_bytes, self._attributes)
            self._configs[grid] = config
        config.hStream = driver.CUstream(stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        (status,) = driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            check(status, f"kernel {self.name} over {operands()}, {grid} blocks of {self._block} threads")


def _config(
    grid: int, block: int, shared_bytes: int, attributes: list[driver.CUlaunchAttribute]
) -> driver.CUlaunchConfig:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _programmatic_launch() -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _clusters_of(blocks: int) -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    return attribute


def check(status: driver.CUresult, action: str) -> None:
    """Errors: KernelError where a call of the driver has failed; `action` says what it was to do."""
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if text else "unknown error"
        raise KernelError(f"{action}: {status.name}: {reason}")
