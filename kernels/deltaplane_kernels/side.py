"""The side ops: what adapters change of a decoder outside the linears of its layers, row by row.

    embedding   x[t] = E_t[id_t] + B (A[:, id_t])   E_t is the base's table, or a trained one
    norms       y[t] = w_t * normalized(x[t])       w_t is the base's weight, or a trained one
    head        logits[t] += B (A h[t])

A and B are of LoRA on the embedding, whose input is a token, and of LoRA on the head, with the scale folded
into B. All are of t's adapter. Sums are kept in float32 and rounded once. Rows of the base model, and of
adapters that lack a part, keep every bit of it whatever others hold.

A pool on a CPU computes in torch (side_torch.py), one on a GPU in Triton (side_cuda.py).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deltaplane_kernels.lora_segments import Runs
from deltaplane_kernels.norm import NormWeight
from deltaplane_kernels.rank_pages import copy_pages
from deltaplane_kernels.side_pages import SidePageLayout, SideShape
from deltaplane_kernels.side_torch import AdapterSide, TorchSideStep, adapter_side


class SideStep(Protocol):
    """What the adapters of a step's rows do outside the layers' linears; T rows."""

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Changes x [T, H], the base's embedding of tokens [T], int64, in place, in the rows whose adapters
        have a table of their own or LoRA there."""
        ...

    def norm_weight(self, norm: str, weight: Tensor) -> NormWeight:
        """The weight that kernels.norm takes for the norm of this path ("layers.0.input_layernorm"). weight:
        the base's [H], which comes back where no row has another one."""
        ...

    def add_head_delta(self, x: Tensor, logits: Tensor) -> None:
        """Adds the deltas of LoRA on the head, whose input is x [T, H], to logits [T, V] in place."""
        ...

    def at(self, rows: Tensor) -> "SideStep":
        """The same for some rows of the step, [n], int64, on the device of the pool."""
        ...


class Side(Protocol):
    """What the adapters of a pool have outside the layers' linears, by slots."""

    def load(self, slot: int, pages: Sequence[int], host_pages: Tensor, shape: SideShape) -> None:
        """Copies an adapter's side pages, host_pages [n, page_elements], into `pages` of the pool.

        Called for a slot that is not loaded, and that no step under way uses. After an error the slot is as
        cleared.
        """
        ...

    def clear(self, slot: int) -> None:
        """Forgets a slot, loaded or not, that no step under way uses."""
        ...

    def step(self, runs: Runs, num_rows: int, with_side: Sequence[int]) -> SideStep | None:
        """Plans one step; None where none of its rows has anything here.

        runs: of the step's adapters. with_side: those slots among them that were loaded here."""
        ...

    def graph_step(self, num_rows: int) -> SideStep:
        """A step to capture in a CUDA graph (see RankPagePool.graph_step)."""
        ...


def make_side(
    layout: SidePageLayout | None, pool_pages: Tensor, num_slots: int, max_tokens: int
) -> Side | None:
    """For the pool of these pages; None where its layout has nothing outside the linears."""
    if layout is None:
        return None
    if not pool_pages.is_cuda:
        return TorchSide(layout, pool_pages)
    from deltaplane_kernels.side_cuda import CudaSide

    return CudaSide(layout, pool_pages, num_slots, max_tokens)


class TorchSide:
    """Of a pool on a CPU."""

    def __init__(self, layout: SidePageLayout, pool_pages: Tensor) -> None:
        self._layout = layout
        self._pool_pages = pool_pages
        self._adapters: dict[int, AdapterSide] = {}

    def load(self, slot: int, pages: Sequence[int], host_pages: Tensor, shape: SideShape) -> None:
        copy_pages(self._pool_pages, pages, host_pages)
        self._adapters[slot] = adapter_side(self._layout, self._pool_pages, pages, shape)

    def clear(self, slot: int) -> None:
        self._adapters.pop(slot, None)

    def step(self, runs: Runs, num_rows: int, with_side: Sequence[int]) -> SideStep | None:
        if not with_side:
            return None
        groups = [
            (torch.cat([torch.arange(*run) for run in runs[slot]]), self._adapters[slot])
            for slot in with_side
        ]
        return TorchSideStep(num_rows, groups)

    def graph_step(self, num_rows: int) -> SideStep:
        raise NotImplementedError("a pool on a CPU has no CUDA graphs")
