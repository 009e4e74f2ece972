"""The LoRA op: adds to each row of a packed linear's output the delta of the row's own adapter.

    y[t, columns of s] += g_s * y[t, columns of s] + d_s + (x[t] A_s^T) B_s
                                        for each row t and each slice s that t's adapter has

    x    [T, in]        input of the packed linear
    y    [T, out]       its output, its bias included; changed in place
    A_s  [rank, in]     of t's adapter; the rank is the slice's own
    B_s  [rank, out_s]  of t's adapter, rank-major, with the scale folded in
    g_s  [out_s]        its gain; 0 without
    d_s  [out_s]        its bias; 0 without

Punica (Chen et al., 2023) names the two products shrink and expand. x A^T is kept in float32, whatever the
type of x, y and the weights; BA is never formed. Rows of the base model, and slices that a row's adapter
lacks, keep every bit whatever other adapters hold: no product mixes the rows of two adapters.

A gain and a bias serve DoRA (Liu et al., 2024) exactly: where f is the magnitude of an output over the norm
of W + s B A there, and the base's bias b0 is trained to b1, they are g = f - 1 and d = (b1 - b0) - g b0,
beside f s B. A trained bias alone is d = b1 - b0.

The rows of a blend of adapters get the sum of its members' deltas, each times a weight:

    y[t, columns of s] += sum of w_i (x[t] A_is^T) B_is

A pool on a CPU computes in torch (lora_torch.py), one on a GPU in CUDA kernels (lora_cuda.py).
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.linear import BaseProduct
from deltaplane_kernels.lora_segments import (
    MAX_BLEND_ROWS,
    Blend,
    Runs,
    Segments,
    Slots,
    check_blend,
    runs_by_slots,
)
from deltaplane_kernels.lora_torch import AdapterDeltas, adapter_deltas, blend_deltas
from deltaplane_kernels.norm import NormWeight, add_rms_norm
from deltaplane_kernels.rank_pages import (
    RANK_PAGE_ROWS,
    AdapterRows,
    RankPageLayout,
    adapter_rank_pages,
    copy_pages,
)
from deltaplane_kernels.side import SideStep, make_side
from deltaplane_kernels.side_pages import NOTHING, SideShape, side_page_layout

if TYPE_CHECKING:
    from deltaplane_kernels.lora_cuda import CudaLora

LONG_RUN = 32
"""Tokens from which a run of rows is computed where it lies; shorter ones of an adapter are gathered."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that one adapter or blend adapts: a run of them, or their numbers."""

    rows: slice | Tensor
    deltas: AdapterDeltas


class StepDeltas(Protocol):
    """The deltas of one step's rows, where they are computed."""

    def base_product(self, layer: int, linear: str, x: Tensor, base: BaseProduct) -> Tensor:
        """See LoraStep.base_product."""
        ...

    def add_delta(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None:
        """See LoraStep.add_delta."""
        ...

    def add_delta_rms_norm(
        self, layer: int, linear: str, x: Tensor, y: Tensor, residual: Tensor, weight: NormWeight, eps: float
    ) -> Tensor:
        """See LoraStep.add_delta_rms_norm."""
        ...


class LoraStep:
    """The adapters of one step's rows. Made by RankPagePool.step, good for that step alone.

    side: what they do outside the linears of the layers; None where none of them does anything there.
    """

    def __init__(self, num_tokens: int, deltas: StepDeltas, side: SideStep | None = None) -> None:
        self.num_tokens = num_tokens
        self.side = side
        self._deltas = deltas

    def base_product(self, layer: int, linear: str, x: Tensor, base: BaseProduct) -> Tensor:
        """base(x), where add_delta of the same layer, linear and x is the next call of this step.

        On a GPU x A^T is computed before it, or beside it. On a CPU nothing is done before add_delta.
        Errors: as add_delta; RuntimeError where the next call is another one.
        """
        if len(x) != self.num_tokens:
            raise ValueError(f"a step of {self.num_tokens} tokens got x of {len(x)} rows")
        return self._deltas.base_product(layer, linear, x, base)

    def add_delta(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None:
        """Adds the deltas of packed linear `linear` ("qkv_proj") of `layer` to y [T, out] in place.

        x [T, in] is the linear's input, T the step's number of tokens; float32, bfloat16 or float16 like y.
        Errors: ValueError where x or y has another number of rows; on a GPU also for another dtype than the
        pool's, and for rows that do not start at multiples of 16 bytes.
        """
        self._check_rows(x, y)
        self._deltas.add_delta(layer, linear, x, y)

    def add_delta_rms_norm(
        self, layer: int, linear: str, x: Tensor, y: Tensor, residual: Tensor, weight: NormWeight, eps: float
    ) -> Tensor:
        """add_delta of a linear of one slice, and norm.add_rms_norm of the y that it gives and residual.

        Returns [T, out]. A GPU makes both calls in one kernel where a step has few rows: a row's delta is
        then summed as that of the only row of its adapter, and its squares in an order of their own. What y
        is afterwards is left open, and in a graph what the rows beyond the step's are in what is returned.
        Errors: as add_delta and norm.add_rms_norm.
        """
        self._check_rows(x, y)
        return self._deltas.add_delta_rms_norm(layer, linear, x, y, residual, weight, eps)

    def _check_rows(self, x: Tensor, y: Tensor) -> None:
        if not x.shape[0] == y.shape[0] == self.num_tokens:
            raise ValueError(f"a step of {self.num_tokens} tokens got x of {len(x)} rows and y of {len(y)}")


@dataclass(frozen=True, slots=True)
class _TorchDeltas:
    """The deltas of a step, group by group."""

    groups: Sequence[_Group]

    def base_product(self, layer: int, linear: str, x: Tensor, base: BaseProduct) -> Tensor:
        return base(x)

    def add_delta(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None:
        for group in self.groups:
            delta = group.deltas[layer].get(linear)
            if delta is None:
                continue
            rows = group.rows
            if isinstance(rows, slice):
                delta.add_to(y[rows], x[rows])
            else:
                gathered = y.index_select(0, rows)
                delta.add_to(gathered, x.index_select(0, rows))
                y.index_copy_(0, rows, gathered)

    def add_delta_rms_norm(
        self, layer: int, linear: str, x: Tensor, y: Tensor, residual: Tensor, weight: NormWeight, eps: float
    ) -> Tensor:
        self.add_delta(layer, linear, x, y)
        return add_rms_norm(y, residual, weight, eps)


@dataclass(slots=True)
class _Slot:
    """What a slot holds: its pages at once, the weights when they are copied in (on a CPU with `deltas`).

    is_plain: whether it is LoRA in the layers alone, as all members of a blend are.
    has_side: whether it has anything outside them.
    """

    pages: tuple[int, ...]
    is_plain: bool
    has_side: bool = False
    ready: bool = False
    deltas: AdapterDeltas = ()


class RankPagePool:
    """Rank pages on a device, and the slots that are bound to them.

    pages: [num_pages, page_elements] of the pool's dtype, taken at once. An adapter in host memory has the
        same layout, [n, page_elements] (see RankPageLayout).
    page_bytes: bytes of one page.
    max_tokens: most rows of a step on a GPU, whose tables and workspace are taken at once too; a CPU has no
        such bound.
    max_blends: most different blends of a step.

    load and clear may be called from any thread, for slots and pages that no step under way uses; the others
    belong to the thread that computes the steps.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        num_pages: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_tokens: int = 8192,
        max_blends: int = 0,
    ) -> None:
        """Errors: on a GPU ValueError for a layout that its kernels do not take (lora_cuda.check_layout)."""
        self.layout = RankPageLayout(layout)
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.max_blends = max_blends
        self.page_bytes = self.layout.page_bytes(dtype)
        with torch.inference_mode(False):  # pages made in inference mode could only be written inside it
            self.pages = torch.zeros(num_pages, self.layout.page_elements, dtype=dtype, device=device)
        self._cuda = _cuda_lora(self.layout, self.pages, num_slots, max_tokens, max_blends)
        self._side_layout = side_page_layout(layout)
        self._side = make_side(self._side_layout, self.pages, num_slots, max_tokens)
        self._slots: dict[int, _Slot] = {}
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    def load(
        self,
        slot: int,
        pages: Sequence[int],
        host_pages: Tensor,
        rows: AdapterRows,
        side: SideShape = NOTHING,
    ) -> None:
        """Copies host_pages [n, page_elements] into `pages`, n of them, and binds these to a free slot.

        The adapter's rank pages come first, then its side pages, whose parts `side` tells.
        Errors: ValueError where the slot or a page is out of range or taken, or where pages, host_pages, rows
        and side do not fit each other. After any error the slot and the pages are free.
        """
        self._check_fit(pages, host_pages, rows, side)
        is_plain = not side and all(one.is_plain for layer in rows for one in layer)
        entry = _Slot(tuple(pages), is_plain, has_side=bool(side))
        self._reserve(slot, entry)
        try:
            num_ranked = adapter_rank_pages(rows)
            self._load_ranked(slot, entry, host_pages[:num_ranked], rows)
            if self._side is not None and side:
                self._side.load(slot, pages[num_ranked:], host_pages[num_ranked:], side)
            entry.ready = True
        except BaseException:
            self.clear(slot)
            raise

    def _load_ranked(self, slot: int, entry: _Slot, host_pages: Tensor, rows: AdapterRows) -> None:
        pages = entry.pages[: len(host_pages)]
        if self._cuda is not None:
            self._cuda.load(slot, pages, host_pages, rows)
            return
        copy_pages(self.pages, pages, host_pages)
        entry.deltas = adapter_deltas(self.layout, self.pages, pages, rows)

    def clear(self, slot: int) -> None:
        """Unbinds a slot; its pages are free afterwards. Errors: ValueError where it is not bound."""
        with self._lock:
            entry = self._slots.pop(slot, None)
            if entry is None:
                raise ValueError(f"slot {slot} holds no adapter")
            self._taken.difference_update(entry.pages)
            if self._side is not None:
                self._side.clear(slot)

    def step(self, segments: Segments) -> LoraStep | None:
        """Plans the deltas of one step; None where all its rows are the base model's.

        segments: (slots, number of tokens) of each sequence in the order of the rows. Slots are an adapter's
        slot, -1 for the base model, or a Blend.
        On a GPU the step's table is sent behind the work of the current stream; nothing is allocated. Steps
        are computed on one stream.
        Errors: ValueError where a slot holds no adapter, a number of tokens is below 1, or there are more
        tokens than max_tokens on a GPU; where a blend is ill-formed, has members with gains, biases or pages
        of more than 256 rows in all, or there are more blends than max_blends.
        """
        runs, num_tokens = runs_by_slots(segments)
        blends = [slots for slots in runs if not isinstance(slots, int)]
        self._check_blends(blends)
        deltas = {slots: self._deltas_of(slots) for slots in runs}
        if not runs:
            return None
        side = self._side.step(runs, num_tokens, self._with_side(runs)) if self._side is not None else None
        if self._cuda is not None:
            self._cuda.stage(runs, blends, num_tokens)
            return LoraStep(num_tokens, self._cuda, side)
        groups = [
            _Group(rows, deltas[slots])
            for slots, own_runs in runs.items()
            for rows in _row_groups(own_runs, self.pages.device)
        ]
        return LoraStep(num_tokens, _TorchDeltas(groups), side)

    def graph_step(self, num_tokens: int) -> LoraStep:
        """A step to capture in a CUDA graph of num_tokens rows: a replay computes what step() staged last.

        That step may have fewer rows than the graph; the graph's other rows are then as of the base, where
        the calls that do more than add_delta do not say otherwise. It must have an adapter: where step()
        answers None it has staged nothing.
        Errors: ValueError for a pool on a CPU, and for more tokens than max_tokens.
        """
        if self._cuda is None:
            raise ValueError(f"a pool on {self.pages.device} has no CUDA graphs")
        self._cuda.check_rows(num_tokens)
        side = self._side.graph_step(num_tokens) if self._side is not None else None
        return LoraStep(num_tokens, self._cuda, side)

    def check_integrity(self) -> None:
        """Asserts that bound slots and pages are in range and that no page belongs to two slots."""
        with self._lock:
            slots = sorted(self._slots)
            pages = sorted(page for entry in self._slots.values() for page in entry.pages)
            taken = sorted(self._taken)
        assert all(0 <= slot < self.num_slots for slot in slots), f"slots {slots} of {self.num_slots}"
        assert all(0 <= page < self.num_pages for page in pages), f"pages {pages} of {self.num_pages}"
        assert len(pages) == len(set(pages)), f"a page belongs to two slots: {pages}"
        assert taken == pages, f"pages {taken} are taken, {pages} are bound"

    def _check_fit(
        self, pages: Sequence[int], host_pages: Tensor, rows: AdapterRows, side: SideShape
    ) -> None:
        shape = (len(pages), self.layout.page_elements)
        if host_pages.dtype != self.pages.dtype or host_pages.shape != shape:
            raise ValueError(
                f"host pages are {host_pages.dtype} {tuple(host_pages.shape)}, "
                f"where {len(pages)} pages of this pool are {self.pages.dtype} {shape}"
            )
        layers, slices = self.layout.num_layers, self.layout.slices_per_layer
        if len(rows) != layers or any(len(layer) != slices for layer in rows):
            raise ValueError(f"rows must be of {layers} layers with {slices} slices each")
        needed = adapter_rank_pages(rows)
        if side:
            if self._side_layout is None:
                raise ValueError("this pool's layout has nothing outside the linears of its layers")
            needed += self._side_layout.place(side).num_pages
        if needed != len(pages):
            raise ValueError(f"an adapter of these rows takes {needed} pages, not {len(pages)}")

    def _reserve(self, slot: int, entry: _Slot) -> None:
        pages = entry.pages
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not one of 0 to {self.num_slots - 1}")
        if not all(0 <= page < self.num_pages for page in pages) or len(set(pages)) != len(pages):
            raise ValueError(f"pages {pages} must be different ones of 0 to {self.num_pages - 1}")
        with self._lock:
            if slot in self._slots:
                raise ValueError(f"slot {slot} is bound; clear it first")
            taken = self._taken.intersection(pages)
            if taken:
                raise ValueError(f"pages {sorted(taken)} belong to another slot")
            self._slots[slot] = entry
            self._taken.update(pages)

    def _bound(self, slot: int) -> _Slot:
        entry = self._slots.get(slot)
        if entry is None or not entry.ready:
            raise ValueError(f"slot {slot} holds no adapter")
        return entry

    def _with_side(self, runs: Runs) -> list[int]:
        """The slots of a step that have anything outside the layers; members of blends have not."""
        return [slot for slot in runs if isinstance(slot, int) and self._bound(slot).has_side]

    def _check_blends(self, blends: Sequence[Blend]) -> None:
        if len(blends) > self.max_blends:
            raise ValueError(f"a step of {len(blends)} blends; this pool takes {self.max_blends}")
        for blend in blends:
            check_blend(blend)
            members = {slot: self._bound(slot) for slot, _ in blend}
            for slot, entry in members.items():
                if not entry.is_plain:
                    raise ValueError(f"slot {slot} holds more than plain LoRA, which no blend takes")
            num_rows = RANK_PAGE_ROWS * sum(len(entry.pages) for entry in members.values())
            if num_rows > MAX_BLEND_ROWS:
                raise ValueError(f"a blend with pages of {num_rows} rows; at most {MAX_BLEND_ROWS}")

    def _deltas_of(self, slots: Slots) -> AdapterDeltas:
        """Of an adapter, or of a blend that is checked; empty on a GPU."""
        if isinstance(slots, int):
            return self._bound(slots).deltas
        return blend_deltas([(self._bound(slot).deltas, weight) for slot, weight in slots])


def _cuda_lora(
    layout: RankPageLayout, pages: Tensor, num_slots: int, max_tokens: int, max_blends: int
) -> "CudaLora | None":
    """The kernels of a pool on a GPU; NVIDIA's packages are imported for such a one alone."""
    if pages.device.type != "cuda":
        return None
    from deltaplane_kernels.lora_cuda import CudaLora

    return CudaLora(layout, pages, num_slots, max_tokens, max_blends)


def _row_groups(runs: Sequence[tuple[int, int]], device: torch.device) -> list[slice | Tensor]:
    """An adapter's or a blend's runs as computed: a single or long run as a slice, the others gathered."""
    if len(runs) == 1:
        return [slice(*runs[0])]
    groups: list[slice | Tensor] = [slice(*run) for run in runs if run[1] - run[0] >= LONG_RUN]
    scattered = [row for start, stop in runs if stop - start < LONG_RUN for row in range(start, stop)]
    if scattered:
        groups.append(torch.tensor(scattered, device=device))
    return groups
