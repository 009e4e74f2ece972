"""Causal attention of a step's tokens over a paged KV cache.

The cache is one tensor, pages[num_pages, num_layers, 2, Hkv, page_size, D], keys at index 0 and values at 1;
kv = pages[:, layer] is a layer's view of it.
* The tokens of a head lie side by side. A CPU gathers rows of page_size * D elements in (sequence, head,
  page) order and has at once, contiguous, the [sequence, head, token, D] that a batched product reads. A CUDA
  kernel reads tiles of [page_size, D], one aligned block each ("HND" in FlashInfer, Ye et al., 2025).
* A page is one block with all its layers: memory that no page in use touches is never committed by the
  operating system, and a page is cleared, or one day moved, in one piece.
"Paged" is vLLM's idea (Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023).

All index tensors of a step are made once, by AttentionPlan, and read by every layer. On a GPU that is an
attention_index.AttentionIndex, and the kernels are those of attention_gpu and rotary_triton.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaplane_kernels.attention_index import AttentionIndex, IndexBuffer, build_index
from deltaplane_kernels.rotary import apply_rotary

_MIN_BUCKET_PAGES = 8
"""Decodes of up to this many pages share a bucket: to gather some padding is cheaper than another launch."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of one sequence in a step, at positions start ... end - 1.

    pages: the sequence's KV pages; page i holds positions [i * page_size, (i + 1) * page_size).
    """

    start: int
    num_tokens: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The dimensions of pages[num_pages, num_layers, 2, num_heads, page_size, head_dim]."""

    num_layers: int
    num_heads: int
    page_size: int
    head_dim: int

    @property
    def page_heads(self) -> int:
        """Heads of keys and values in a page, all layers together."""
        return self.num_layers * 2 * self.num_heads


class AttentionPlan:
    """Where the tokens of one step stand in the KV pages.

    runs: in the order of the rows of q: run 0 takes the first num_tokens rows, and so on.
    windows: the sliding windows of the model's layers; None is full attention.
    dtype: of q and kv.
    index: what the GPU kernels read (attention_index); None on a CPU.
    Errors: ValueError when the pages of a run do not reach its end.
    """

    def __init__(
        self,
        runs: Sequence[TokenRun],
        *,
        layout: KVLayout,
        windows: Iterable[int | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        _check_pages(runs, layout)
        self.layout = layout
        self.num_tokens = sum(run.num_tokens for run in runs)
        self.windows = frozenset(windows)
        self.index: AttentionIndex | None = None
        if device.type == "cuda":
            self.index = build_index(
                runs, page_size=layout.page_size, num_kv_heads=layout.num_heads, device=device
            )
            return
        self.kv_rows = _kv_rows(runs, layout).to(device)
        self.groups = {
            window: [group.to(device) for group in _groups(runs, layout, window, dtype)]
            for window in self.windows
        }

    def check(self, kv: Tensor) -> None:
        """That kv lies in memory as planned. Errors: ValueError."""
        layout = self.layout
        shape = (2, layout.num_heads, layout.page_size, layout.head_dim)
        stride = layout.page_heads * layout.page_size * layout.head_dim
        if kv.shape[1:] != shape or kv.stride(0) != stride:
            raise ValueError(
                f"kv {tuple(kv.shape)} with page stride {kv.stride(0)} is not a layer of pages of {layout}"
            )


class FixedPlan(AttentionPlan):
    """A plan of num_rows rows in one place on a GPU: a CUDA graph that was captured with it serves whatever
    fill() has put there since, nothing at first. Rows that no run fills write nothing, and attend to nothing:
    their output is zero.

    buffer: holds steps of num_rows rows; plans of several sizes may share one, and then the one that was
        filled last is good.
    """

    def __init__(
        self, num_rows: int, buffer: IndexBuffer, *, layout: KVLayout, windows: Iterable[int | None]
    ) -> None:
        self.layout = layout
        self.num_tokens = num_rows
        self.windows = frozenset(windows)
        self._buffer = buffer
        self.index: AttentionIndex = buffer.index(num_rows)
        self.fill([])

    def fill(self, runs: Sequence[TokenRun]) -> None:
        """Takes the runs as rows 0, 1, ...; one copy on the current stream, which the host does not wait for.

        Errors: ValueError when they are more, longer or of more pages than the plan has room for, or the
        pages of one do not reach its end.
        """
        buffer = self._buffer
        num_tokens = sum(run.num_tokens for run in runs)
        if num_tokens > self.num_tokens or len(runs) > buffer.max_sequences:
            raise ValueError(
                f"{num_tokens} tokens of {len(runs)} runs do not fit a plan of {self.num_tokens} rows and "
                f"{buffer.max_sequences} runs"
            )
        for run in runs:
            if len(run.pages) > buffer.max_pages or (buffer.decodes_alone and run.num_tokens != 1):
                what = "a decode" if buffer.decodes_alone else "a run"
                raise ValueError(
                    f"a run of {run.num_tokens} tokens and {len(run.pages)} pages is not {what} of at most "
                    f"{buffer.max_pages} pages"
                )
        _check_pages(runs, self.layout)
        buffer.fill(runs, self.num_tokens)


def rotary_write_kv(heads: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, plan: AttentionPlan) -> None:
    """Turns queries and keys by their positions, the queries in place, and writes keys and values to their
    places (apply_rotary and write_kv in one pass).

    heads: [T, Hq + 2 * Hkv, D] in the dtype of kv, the queries, keys and values of each token. What the keys
        in it are afterwards is left open.
    cos, sin: [T, 1, D] from rotary_factors.
    kv: [num_pages, 2, Hkv, page_size, D], a layer of the pages, written in place.
    Errors: ValueError when kv is not a layer of pages as planned, RuntimeError when the shapes do not fit.
    """
    num_kv_heads = plan.layout.num_heads
    if plan.index is not None:
        from deltaplane_kernels import rotary_triton

        plan.check(kv)
        rotary_triton.rotary_write_kv(heads, cos, sin, kv, plan.index.slots)
        return
    apply_rotary(heads[:, :-num_kv_heads], cos, sin)
    write_kv(kv, heads[:, -2 * num_kv_heads :], plan)


def write_kv(kv: Tensor, keys_values: Tensor, plan: AttentionPlan) -> None:
    """Writes the step's keys and values to their places: kv[page, :, :, slot] = keys_values[t].

    kv: [num_pages, 2, Hkv, page_size, D], a layer of the pages, written in place.
    keys_values: [T, 2 * Hkv, D] in the dtype of kv, the key heads and then the value heads of each token.
    Errors: ValueError when kv is not a layer of pages as planned, RuntimeError when keys_values does not fit.
    """
    plan.check(kv)
    if plan.index is not None:
        from deltaplane_kernels import rotary_triton

        rotary_triton.write_kv(kv, keys_values, plan.index.slots)
        return
    head_dim = kv.shape[-1]
    as_rows(kv, head_dim).index_copy_(0, plan.kv_rows, keys_values.reshape(-1, head_dim))


def paged_attention(q: Tensor, kv: Tensor, plan: AttentionPlan, window: int | None = None) -> Tensor:
    """out[t, h] = sum_s softmax_s(q[t, h] . k[s, h'] / sqrt(D)) v[s, h'], with h' = h * Hkv // Hq.

    s runs over the tokens of t's own sequence up to t itself; with a window, over the last `window` of them.

    q: [T, Hq, D], Hq a multiple of Hkv (grouped-query attention); may be a view into packed q, k and v.
    kv: [num_pages, 2, Hkv, page_size, D], a layer of the pages, in the dtype of q, with the step's tokens
        written already. Slots of the runs' pages that are not written yet must be finite: they are read, and
        count for nothing. What a run attends to beside its own tokens was written by earlier steps: a GPU
        may read it while the step's own are still being written.
    window: None, or one of the plan's windows.
    Returns [T, Hq * D], contiguous. A row depends on its own sequence's pages alone.
    Errors: ValueError when kv is not a layer of pages as planned, KeyError for a window that is not planned.
    """
    plan.check(kv)
    if plan.index is not None:
        from deltaplane_kernels import attention_gpu

        if window not in plan.windows:
            raise KeyError(window)
        return attention_gpu.paged_attention(q, kv, plan.index, window)
    groups = plan.groups[window]
    if len(groups) == 1:
        return groups[0].attend(q, kv).reshape(plan.num_tokens, -1)
    out = q.new_empty(q.shape)
    for group in groups:
        out[group.rows] = group.attend(q[group.rows], kv)
    return out.view(plan.num_tokens, -1)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """One token each of several sequences of like length, whose pages are gathered side by side.

    The query heads that share a KV head are folded into the query dimension, so no KV head is repeated.

    rows: [B], of q.
    gather: [2 * B * Hkv * pages], rows of kv seen as rows of page_size * D.
    mask: [B, 1, 1, keys], 0 or -inf.
    """

    rows: Tensor
    gather: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> "_DecodeGroup":
        return _DecodeGroup(self.rows.to(device), self.gather.to(device), self.mask.to(device))

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """q: [B, Hq, D]. Returns [B, Hq, D]."""
        batch, _, head_dim = q.shape
        keys, values = _gather(kv, self.gather).view(2, batch, kv.shape[2], -1, head_dim)
        folded = q.reshape(batch, kv.shape[2], -1, head_dim)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask).reshape(q.shape)


@dataclass(frozen=True, slots=True)
class _PrefillGroup:
    """A chunk of one sequence, which attends to its cached context and to itself.

    rows: of q.
    gather: as in _DecodeGroup, with B = 1.
    num_keys: keys that are there; the rest of the last page is left out.
    mask: [num_tokens, num_keys], 0 or -inf; None where plain causal attention is meant.
    """

    rows: slice
    gather: Tensor
    num_keys: int
    mask: Tensor | None

    def to(self, device: torch.device) -> "_PrefillGroup":
        mask = None if self.mask is None else self.mask.to(device)
        return _PrefillGroup(self.rows, self.gather.to(device), self.num_keys, mask)

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """q: [num_tokens, Hq, D]. Returns [num_tokens, Hq, D]."""
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = kv.shape[2]
        shape = (num_kv_heads, num_heads // num_kv_heads, self.num_keys, head_dim)
        keys, values = (
            part[:, None, : self.num_keys].expand(shape)
            for part in _gather(kv, self.gather).view(2, num_kv_heads, -1, head_dim)
        )
        grouped = q.reshape(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self.mask, is_causal=self.mask is None
        )
        return out.permute(2, 0, 1, 3).reshape(q.shape)


def _check_pages(runs: Sequence[TokenRun], layout: KVLayout) -> None:
    for run in runs:
        if len(run.pages) * layout.page_size < run.end:
            raise ValueError(
                f"{len(run.pages)} pages of {layout.page_size} tokens do not hold {run.end} tokens"
            )


def _gather(kv: Tensor, rows: Tensor) -> Tensor:
    return as_rows(kv, kv.shape[3] * kv.shape[4]).index_select(0, rows)


def as_rows(kv: Tensor, width: int) -> Tensor:
    """A layer's memory from its first page to its last as [rows, width], what other layers own in between
    included."""
    span = (kv.shape[0] - 1) * kv.stride(0) + math.prod(kv.shape[1:])
    return kv.as_strided((span // width, width), (width, 1))


def _kv_rows(runs: Sequence[TokenRun], layout: KVLayout) -> Tensor:
    """[T * 2 * Hkv]: for each token and each of its key and value heads, the row of kv seen as rows of D."""
    size = layout.page_size
    page_rows = layout.page_heads * size
    first = torch.tensor(
        [run.pages[p // size] * page_rows + p % size for run in runs for p in range(run.start, run.end)]
    )
    return (first[:, None] + torch.arange(2 * layout.num_heads) * size).flatten()


def _page_rows(tables: Sequence[Sequence[int]], layout: KVLayout) -> Tensor:
    """[2 * B * Hkv * pages]: rows of kv seen as rows of page_size * D, for block tables [B][pages]."""
    heads = layout.num_heads
    parts = torch.arange(2)[:, None, None, None] * heads + torch.arange(heads)[:, None]
    return (torch.tensor(tables)[None, :, None, :] * layout.page_heads + parts).flatten()


def _groups(
    runs: Sequence[TokenRun], layout: KVLayout, window: int | None, dtype: torch.dtype
) -> list[_DecodeGroup | _PrefillGroup]:
    groups: list[_DecodeGroup | _PrefillGroup] = []
    buckets: dict[int, list[tuple[int, TokenRun]]] = defaultdict(list)
    row = 0
    for run in runs:
        if run.num_tokens == 1:
            buckets[_bucket(len(_visible_pages(run, layout, window)))].append((row, run))
        else:
            groups.append(_prefill_group(run, row, layout, window, dtype))
        row += run.num_tokens
    decodes = [_decode_group(bucket, layout, window, dtype) for bucket in buckets.values()]
    return decodes + groups


def _bucket(num_pages: int) -> int:
    """Numbers of pages with the same answer are padded to the longest of them: at most twofold."""
    return (max(num_pages, _MIN_BUCKET_PAGES) - 1).bit_length()


def _visible_pages(run: TokenRun, layout: KVLayout, window: int | None) -> range:
    """The pages that hold a key which a token of the run attends to."""
    first = 0 if window is None else max(0, run.start - window + 1) // layout.page_size
    return range(first, -(-run.end // layout.page_size))


def _decode_group(
    bucket: Sequence[tuple[int, TokenRun]], layout: KVLayout, window: int | None, dtype: torch.dtype
) -> _DecodeGroup:
    visible = [_visible_pages(run, layout, window) for _, run in bucket]
    num_pages = max(len(pages) for pages in visible)
    tables = []
    for (_, run), pages in zip(bucket, visible, strict=True):
        table = list(run.pages[pages.start : pages.stop])
        # Padding repeats a page of the sequence itself: what a row reads, masked or not, is its own.
        tables.append(table + table[:1] * (num_pages - len(table)))
    keys = torch.arange(num_pages * layout.page_size) + (
        torch.tensor([pages.start for pages in visible])[:, None] * layout.page_size
    )
    mask = _mask(torch.tensor([run.start for _, run in bucket])[:, None], keys, window, dtype)
    return _DecodeGroup(
        rows=torch.tensor([row for row, _ in bucket]),
        gather=_page_rows(tables, layout),
        mask=mask[:, None, None, :],
    )


def _prefill_group(
    run: TokenRun, row: int, layout: KVLayout, window: int | None, dtype: torch.dtype
) -> _PrefillGroup:
    visible = _visible_pages(run, layout, window)
    first = visible.start * layout.page_size
    mask = None
    if run.start > 0 or (window is not None and window < run.end):
        queries = torch.arange(run.start, run.end)[:, None]
        mask = _mask(queries, torch.arange(first, run.end), window, dtype)
    return _PrefillGroup(
        rows=slice(row, row + run.num_tokens),
        gather=_page_rows([run.pages[visible.start : visible.stop]], layout),
        num_keys=run.end - first,
        mask=mask,
    )


def _mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the token at position queries may look at the one at position keys, -inf elsewhere."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
