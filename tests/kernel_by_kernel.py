"""What stand-ins for the adapters of a step share."""

from abc import ABC, abstractmethod

from torch import Tensor

from deltaplane_kernels.norm import NormWeight, add_rms_norm


class KernelByKernel(ABC):
    """Composes what a LoraStep may do in one kernel out of the add_delta that a stand-in has."""

    @abstractmethod
    def add_delta(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None: ...

    def add_delta_rms_norm(
        self, layer: int, linear: str, x: Tensor, y: Tensor, residual: Tensor, weight: NormWeight, eps: float
    ) -> Tensor:
        self.add_delta(layer, linear, x, y)
        return add_rms_norm(y, residual, weight, eps)
