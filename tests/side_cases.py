"""Random adapters with parts outside the linears of the layers, and the side ops as the plainest loops."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, OutsideLayers
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.lora_segments import Slots
from deltaplane_kernels.norm import add_rms_norm, rms_norm
from deltaplane_kernels.rank_pages import NO_ROWS, RankPageLayout, SliceRows
from deltaplane_kernels.side import SideStep
from deltaplane_kernels.side_pages import RowBlock, SidePageLayout, SideShape, side_page_layout
from lora_cases import BASE, make_adapter, make_layout

EPS = 1e-5


def make_outside_layout(
    vocab: int = 200, hidden: int = 64, head_dim: int = 16, num_layers: int = 2
) -> AdapterLayout:
    """The linears of lora_cases.make_layout, and vocabulary and norms around them."""
    norms = {
        f"layers.{layer}.{norm}": size
        for layer in range(num_layers)
        for norm, size in (("input_layernorm", hidden), ("self_attn.q_norm", head_dim))
    }
    layout = make_layout(num_layers, hidden)
    return replace(layout, outside=OutsideLayers(vocab, hidden, norms | {"norm": hidden}))


def outside_of(layout: AdapterLayout) -> OutsideLayers:
    """What is outside the linears of a layout that has such."""
    assert layout.outside is not None
    return layout.outside


@dataclass(frozen=True)
class SideAdapter:
    """Parts in float32; None and missing where it has none.

    head, embedding: A and B^T, [rank, H] and [rank, V], or [rank, V] and [rank, H]. table: [V, H].
    norms: by path, [size].
    """

    outside: OutsideLayers
    head: tuple[Tensor, Tensor] | None = None
    embedding: tuple[Tensor, Tensor] | None = None
    table: Tensor | None = None
    norms: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> SideShape:
        return SideShape(
            head_rank=len(self.head[0]) if self.head else 0,
            embedding_rank=len(self.embedding[0]) if self.embedding else 0,
            has_table=self.table is not None,
            norms=tuple(norm for norm in self.outside.norms if norm in self.norms),
        )

    def touches(self, part: str) -> bool:
        """Whether it changes "embedding", "head" or the norm of this path."""
        if part == "embedding":
            return self.embedding is not None or self.table is not None
        return self.head is not None if part == "head" else part in self.norms

    def host_pages(self, layout: SidePageLayout, dtype: torch.dtype) -> Tensor:
        """[n, page_elements]. What belongs to no part is NaN, which no op may read."""
        place = layout.place(self.shape)
        pages = torch.full((place.num_pages, layout.page_elements), torch.nan, dtype=dtype)
        head, embedding = self.head or (None, None), self.embedding or (None, None)
        parts = [
            (place.head_a, head[0]),
            (place.head_b, head[1]),
            (place.embedding_a, embedding[0]),
            (place.embedding_b, embedding[1]),
            (place.table, self.table),
        ]
        for block, rows in parts:
            assert (block is None) == (rows is None)
            if block is not None and rows is not None:
                _write(block, pages, rows)
        for norm, at in place.norms.items():
            assert place.norm_row is not None
            [[row]] = place.norm_row.runs(pages, range(len(pages)))
            row[at : at + self.outside.norms[norm]] = self.norms[norm].to(dtype)
        return pages


def _write(block: RowBlock, pages: Tensor, rows: Tensor) -> None:
    row = 0
    for run in block.runs(pages, range(len(pages))):
        run.copy_(rows[row : row + len(run)])
        row += len(run)
    assert row == len(rows)


def make_side_adapter(
    outside: OutsideLayers,
    *,
    head: int = 0,
    embedding: int = 0,
    table: bool = False,
    norms: Sequence[str] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> SideAdapter:
    """Random parts whose values `dtype` holds exactly. head, embedding: ranks."""
    generator = torch.Generator().manual_seed(seed)
    vocab, hidden = outside.vocab_size, outside.hidden_size

    def rows(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).float()

    return SideAdapter(
        outside,
        head=(rows(head, hidden, scale=hidden**-0.5), rows(head, vocab)) if head else None,
        embedding=(rows(embedding, vocab), rows(embedding, hidden)) if embedding else None,
        table=rows(vocab, hidden) if table else None,
        norms={norm: rows(outside.norms[norm]) for norm in norms},
    )


def make_side_adapters(outside: OutsideLayers, dtype: torch.dtype = torch.float32) -> list[SideAdapter]:
    """Of many shapes; the one in the middle has nothing."""
    all_norms = list(outside.norms)
    options = [
        {"head": 4},
        {"embedding": 3},
        {"head": 8, "embedding": 16},
        {},
        {"norms": all_norms},
        {"norms": all_norms[1:2], "head": 1},
        {"table": True},
        {"table": True, "embedding": 5, "head": 17, "norms": all_norms[:1]},
    ]
    return [
        make_side_adapter(outside, seed=seed, dtype=dtype, **option)  # type: ignore[arg-type]
        for seed, option in enumerate(options)
    ]


def no_rows(layout: AdapterLayout) -> list[list[SliceRows]]:
    """Of an adapter that leaves the linears alone."""
    return [[NO_ROWS] * RankPageLayout(layout).slices_per_layer for _ in range(layout.num_layers)]


def embed_by_loop(adapters: Sequence[SideAdapter], slots: Sequence[int], tokens: Tensor, x: Tensor) -> Tensor:
    """x after SideStep.embed, in float64."""
    result = x.double()
    for row, slot in enumerate(slots):
        if slot == BASE:
            continue
        adapter, token = adapters[slot], tokens[row]
        if adapter.table is not None:
            result[row] = adapter.table[token]
        if adapter.embedding is not None:
            a, b = adapter.embedding
            result[row] += a[:, token].double() @ b.double()
    return result


def head_by_loop(adapters: Sequence[SideAdapter], slots: Sequence[int], x: Tensor, logits: Tensor) -> Tensor:
    """logits after SideStep.add_head_delta, in float64."""
    result = logits.double()
    for row, slot in enumerate(slots):
        head = adapters[slot].head if slot != BASE else None
        if head is not None:
            a, b = head
            result[row] += (a.double() @ x[row].double()) @ b.double()
    return result


def norm_by_loop(
    adapters: Sequence[SideAdapter], slots: Sequence[int], norm: str, weight: Tensor, x: Tensor
) -> Tensor:
    """The norm of x [T, ..., H] in float64, with the weight of each row's adapter."""
    wide = x.double()
    normalized = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    for row, slot in enumerate(slots):
        own = adapters[slot].norms.get(norm, weight) if slot != BASE else weight
        normalized[row] *= own.double()
    return normalized


def side_layout(layout: AdapterLayout) -> SidePageLayout:
    """That of a layout that has something outside the linears."""
    found = side_page_layout(layout)
    assert found is not None
    return found


def filled_pool(
    adapters: Sequence[SideAdapter],
    layout: AdapterLayout,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RankPagePool:
    """Adapter i in slot i, in pages that run backwards and are never neighbours; odd slots have rank pages
    too."""
    sides = [adapter.host_pages(side_layout(layout), dtype) for adapter in adapters]
    free = list(range(2 * sum(len(side) + 2 for side in sides)))
    pool = RankPagePool(layout, len(free), len(adapters), dtype, device, max_tokens=1024)
    for slot, (adapter, side) in enumerate(zip(adapters, sides, strict=True)):
        linears = make_adapter(layout, 12, seed=slot) if slot % 2 or not adapter.shape else None
        ranked = side[:0] if linears is None else linears.host_pages(dtype)
        host = torch.cat((ranked, side))
        rows = no_rows(layout) if linears is None else linears.rows
        pool.load(slot, [free.pop() for _ in range(2 * len(host))][::2], host, rows, adapter.shape)
    pool.check_integrity()
    return pool


@dataclass(frozen=True)
class SideCheck:
    """Random inputs of a step, what the side ops make of them, and whether that is right.

    inputs: lie where the ops run. A graph may compute outputs() ahead of a check, from inputs that stay.
    """

    adapters: Sequence[SideAdapter]
    dtype: torch.dtype
    tokens: Tensor
    x: Tensor
    logits: Tensor
    heads: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def of(
        cls, adapters: Sequence[SideAdapter], num_rows: int, dtype: torch.dtype, device: str = "cpu"
    ) -> "SideCheck":
        outside = adapters[0].outside
        generator = torch.Generator().manual_seed(num_rows)

        def rows(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator)
            values.view(-1)[::3] = -0.0  # adding a zero would turn it into 0.0
            return values.to(device, dtype)

        tokens = torch.randint(outside.vocab_size, (num_rows,), generator=generator).to(device)
        x, logits = rows(num_rows, outside.hidden_size), rows(num_rows, outside.vocab_size)
        heads = {norm: rows(num_rows, 3, size) for norm, size in outside.norms.items()}
        weights = {norm: rows(size) for norm, size in outside.norms.items()}
        return cls(adapters, dtype, tokens, x, logits, heads, weights)

    def outputs(self, side: SideStep | None) -> dict[str, Tensor]:
        """By "embedding", "head" and the path of each norm; those of the base where side is None."""
        embedded, logits = self.x.clone(), self.logits.clone()
        if side is not None:
            side.embed(self.tokens, embedded)
            side.add_head_delta(self.x, logits)
        outputs = {"embedding": embedded, "head": logits}
        for norm, base in self.weights.items():
            heads, weight = self.heads[norm], base if side is None else side.norm_weight(norm, base)
            flat = heads[:, 0].contiguous()
            summed = add_rms_norm(flat, torch.zeros_like(flat), weight, EPS)
            outputs[norm] = torch.cat((rms_norm(heads, weight, EPS), summed[:, None]), 1)
        return outputs

    def expected(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """The same by loops, in float64."""
        x, tokens = self.x.cpu(), self.tokens.cpu()
        expected = {
            "embedding": embed_by_loop(self.adapters, slots, tokens, x),
            "head": head_by_loop(self.adapters, slots, x, self.logits.cpu()),
        }
        for norm, weight in self.weights.items():
            heads = self.heads[norm].cpu()
            heads = torch.cat((heads, heads[:, :1]), 1)
            expected[norm] = norm_by_loop(self.adapters, slots, norm, weight.cpu(), heads)
        return expected

    def check(self, slots: Sequence[int], outputs: dict[str, Tensor]) -> None:
        """Compares the first rows, which are of these slots. Those that nothing touches must have the base's
        bits."""
        of_base, expected = self.outputs(None), self.expected(slots)
        tolerance = {torch.float32: 4e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}[self.dtype]
        for part, output in outputs.items():
            actual, base = output.cpu(), of_base[part].cpu()
            rows = slice(len(slots))
            torch.testing.assert_close(
                actual[rows].double(), expected[part][rows], rtol=tolerance, atol=tolerance
            )
            for row, slot in enumerate(slots):
                if slot == BASE or not self.adapters[slot].touches(part):
                    assert same_bits(actual[row], base[row]), f"row {row} of slot {slot} in {part}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_step(
    pool: RankPagePool,
    adapters: Sequence[SideAdapter],
    segments: Sequence[tuple[Slots, int]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compares all ops of a step with the loops."""
    slots = slots_of(segments)
    step = pool.step(segments)
    check = SideCheck.of(adapters, len(slots), dtype, str(pool.pages.device))
    check.check(slots, check.outputs(step.side if step is not None else None))


def slots_of(segments: Sequence[tuple[Slots, int]]) -> list[int]:
    """Of each row."""
    return [slot for slot, count in segments for _ in range(count) if isinstance(slot, int)]
