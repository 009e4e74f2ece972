"""Sequences in KV pages for tests of attention, on any device, and what attention over them must give."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaplane_kernels.attention import FixedPlan, KVLayout, TokenRun
from deltaplane_kernels.attention_index import IndexBuffer

PAGE = 16


@dataclass
class PagedCase:
    """Sequences with a cached context, and the tokens of a step that follow it.

    kv: the middle one of three layers, with all tokens in it, the step's own included; NaN wherever no token
        is, and in the other layers.
    packed: [T, Hq + 2 * Hkv, D], queries, keys and values of the step's tokens.
    """

    layout: KVLayout
    runs: list[TokenRun]
    kv: Tensor
    packed: Tensor

    @property
    def queries(self) -> Tensor:
        """[T, Hq, D]"""
        return self.packed[:, : -2 * self.layout.num_heads]

    def forget_step(self) -> None:
        """Takes the step's own keys and values out of the pages."""
        for run in self.runs:
            for position in range(run.start, run.end):
                self.kv[run.pages[position // PAGE], :, :, position % PAGE] = torch.nan


def make_case(
    spans: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """spans: (context, new tokens) of each sequence."""
    torch.manual_seed(seed)
    sizes = [-(-(context + new) // PAGE) for context, new in spans]
    free = list(range(sum(sizes) + 3))
    random.Random(seed).shuffle(free)
    pages = torch.full((len(free), 3, 2, num_kv_heads, PAGE, head_dim), torch.nan, dtype=dtype, device=device)
    kv = pages[:, 1]
    num_tokens = sum(new for _, new in spans)
    packed = torch.randn(num_tokens, num_kv_heads * (group + 2), head_dim, device=device).to(dtype)
    runs, row = [], 0
    for (context, new), size in zip(spans, sizes, strict=True):
        table = [free.pop() for _ in range(size)]
        history = torch.randn(context + new, 2, num_kv_heads, head_dim, device=device).to(dtype)
        history[context:] = packed[row : row + new, -2 * num_kv_heads :].view(new, 2, num_kv_heads, head_dim)
        positions = torch.arange(context + new, device=device)
        places = torch.tensor(table, device=device)[positions // PAGE]
        kv.permute(0, 3, 1, 2, 4)[places, positions % PAGE] = history
        runs.append(TokenRun(context, new, table))
        row += new
    return PagedCase(KVLayout(3, num_kv_heads, PAGE, head_dim), runs, kv, packed)


def fixed_plan(
    num_rows: int,
    max_sequences: int,
    max_pages: int,
    layout: KVLayout,
    window: int | None,
    device: torch.device,
    *,
    decodes_alone: bool = False,
) -> FixedPlan:
    """A plan with a buffer of its own."""
    buffer = IndexBuffer(
        num_rows,
        max_sequences,
        max_pages,
        decodes_alone=decodes_alone,
        page_size=layout.page_size,
        num_kv_heads=layout.num_heads,
        device=device,
    )
    return FixedPlan(num_rows, buffer, layout=layout, windows=[window])


def reference(queries: Tensor, kv: Tensor, runs: Sequence[TokenRun], window: int | None) -> Tensor:
    """[T, Hq * D], in float32 sequence by sequence, from the queries and the pages as they are rounded."""
    rows: list[Tensor] = []
    row = 0
    for run in runs:
        q = queries[row : row + run.num_tokens].float()
        row += run.num_tokens
        keys, values = kv[list(run.pages)].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : run.end]
        grouped = q.view(run.num_tokens, keys.shape[0], -1, q.shape[-1])
        scores = torch.einsum("thgd,hsd->htgs", grouped, keys) / q.shape[-1] ** 0.5
        query_positions = torch.arange(run.start, run.end, device=q.device)[:, None]
        key_positions = torch.arange(run.end, device=q.device)
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        weights = scores.masked_fill_(hidden[:, None], -torch.inf).softmax(-1)
        rows.append(torch.einsum("htgs,hsd->thgd", weights, values).reshape(run.num_tokens, -1))
    return torch.cat(rows)
