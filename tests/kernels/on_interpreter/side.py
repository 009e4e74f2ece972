"""The side kernels on Triton's interpreter, against torch; test_ops_triton.py runs this file."""

import pytest
import torch
from torch import Tensor

from deltaplane_kernels import norm_triton, side_triton
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.norm import RowWeights, rms_norm
from deltaplane_kernels.side_pages import SidePageLayout, side_page_layout
from deltaplane_kernels.side_tables import SideTables
from deltaplane_kernels.side_torch import TorchSideStep, adapter_side
from lora_cases import BASE
from side_cases import (
    SideAdapter,
    embed_by_loop,
    make_outside_layout,
    make_side_adapter,
    make_side_adapters,
    outside_of,
    side_layout,
)

DTYPES = [torch.float32, torch.float16]
SLOTS = [0, 1, BASE, 2, 4, 7, 6, BASE, 5, 2, 7]


class Case:
    """Adapters in a pool, as the kernels and as torch read them; rows of SLOTS."""

    def __init__(self, layout: AdapterLayout, dtype: torch.dtype) -> None:
        found = side_page_layout(layout)
        assert found is not None
        self.dtype = dtype
        self.outside = outside_of(layout)
        self.adapters = make_side_adapters(self.outside, dtype)
        hosts = [adapter.host_pages(found, dtype) for adapter in self.adapters]
        free = list(range(sum(map(len, hosts)) + 1))
        pool = torch.full((len(free), found.page_elements), torch.nan, dtype=dtype)
        self.tables = SideTables.empty(found, pool, len(hosts))
        groups = []
        for slot, (adapter, host) in enumerate(zip(self.adapters, hosts, strict=True)):
            pages = [free.pop() for _ in host]
            pool[pages] = host
            self._bind(slot, pages, adapter)
            rows = torch.tensor([row for row, own in enumerate(SLOTS) if own == slot], dtype=torch.int64)
            groups.append((rows, adapter_side(found, pool, pages, adapter.shape)))
        self.reference = TorchSideStep(len(SLOTS), groups)
        has_parts = [slot != BASE and bool(self.adapters[slot].shape) for slot in SLOTS]
        self.slots = torch.tensor(SLOTS, dtype=torch.int32).masked_fill(~torch.tensor(has_parts), BASE)

    def _bind(self, slot: int, pages: list[int], adapter: SideAdapter) -> None:
        tables = self.tables
        rows = tables.rows_of(pages, adapter.shape)
        for table, row in zip((tables.parts, tables.pages, tables.norms), rows, strict=True):
            table[slot] = row

    def random(self, width: int) -> Tensor:
        return torch.randn(len(SLOTS), width).to(self.dtype)

    def close(self, actual: Tensor, expected: Tensor, before: Tensor) -> None:
        """before: what rows without any part keep."""
        tolerance = 4 * torch.finfo(self.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=8 * tolerance)
        base = self.slots < 0
        assert torch.equal(actual[base], before[base])


def make_case(kind: str, dtype: torch.dtype) -> Case:
    """kind: "odd" sizes, or vocabulary rows of which a page holds few."""
    if kind == "odd":
        return Case(make_outside_layout(vocab=2099, hidden=60, head_dim=13), dtype)
    layout: SidePageLayout | None = side_page_layout(make_outside_layout(num_layers=1))
    assert layout is not None
    return Case(make_outside_layout(vocab=layout.page_elements // 2 - 3, num_layers=1), dtype)


@pytest.fixture(params=[(kind, dtype) for kind in ("odd", "many pages") for dtype in DTYPES], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(*request.param)


def test_embed(case: Case) -> None:
    tokens = torch.randint(case.outside.vocab_size, (len(SLOTS),))
    before = case.random(case.outside.hidden_size)
    x, expected = before.clone(), before.clone()
    case.reference.embed(tokens, expected)
    side_triton.embed(case.tables, case.slots, tokens, x)
    case.close(x, expected, before)


def test_head_delta(case: Case) -> None:
    x, before = case.random(case.outside.hidden_size), case.random(case.outside.vocab_size)
    logits, expected = before.clone(), before.clone()
    case.reference.add_head_delta(x, expected)
    side_triton.add_head_delta(case.tables, case.slots, x, logits)
    case.close(logits, expected, before)


@pytest.mark.parametrize("norm", ["norm", "layers.0.input_layernorm", "layers.0.self_attn.q_norm"])
def test_norms(case: Case, norm: str) -> None:
    size = case.outside.norms[norm]
    weight = torch.randn(size).to(case.dtype)
    offsets = case.tables.norms[:, case.tables.norm_columns[norm]]
    own = RowWeights(weight, case.slots, offsets, case.tables.pool)
    per_row = case.reference.norm_weight(norm, weight)
    x = case.random(5 * size).view(-1, 5, size)[:, 1:4]
    y = norm_triton.rms_norm(x, own, 1e-5)
    case.close(y, rms_norm(x, per_row, 1e-5), norm_triton.rms_norm(x, weight, 1e-5))
    x, residual = case.random(size), case.random(size)
    of_base = norm_triton.add_rms_norm(x, residual.clone(), weight, 1e-5)
    expected = rms_norm(residual + x, per_row, 1e-5)
    case.close(norm_triton.add_rms_norm(x, residual, own, 1e-5), expected, of_base)


def test_a_base_of_which_a_page_holds_no_row_of_the_vocabulary() -> None:
    """Norms and tables are served there, and LoRA on the vocabulary is nobody's."""
    vocab = side_layout(make_outside_layout()).page_elements + 1
    layout = make_outside_layout(vocab=vocab)
    found = side_layout(layout)
    adapter = make_side_adapter(outside_of(layout), table=True, norms=["norm"])
    pool = adapter.host_pages(found, torch.float32)
    tables = SideTables.empty(found, pool, 1)
    own = tables.rows_of(range(len(pool)), adapter.shape)
    for table, row in zip((tables.parts, tables.pages, tables.norms), own, strict=True):
        table[0] = row
    slots, tokens = torch.tensor([0, -1], dtype=torch.int32), torch.tensor([vocab - 1, 0])
    x, logits = torch.randn(2, 64), torch.randn(2, vocab)
    before, expected = logits.clone(), embed_by_loop([adapter], [0, BASE], tokens, x)
    side_triton.embed(tables, slots, tokens, x)
    side_triton.add_head_delta(tables, slots, x, logits)
    assert torch.equal(x.double(), expected)
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    case = make_case("odd", torch.float32)
    slots, x = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 60)
    side_triton.embed(case.tables, slots, torch.zeros(0, dtype=torch.int64), x)
    side_triton.add_head_delta(case.tables, slots, x, torch.zeros(0, 2099))


def test_what_does_not_fit_is_refused() -> None:
    case = make_case("odd", torch.float32)
    x, logits = case.random(60), case.random(2099)
    with pytest.raises(ValueError, match=r"\(11, 60\) of torch.float32, contiguous, is needed"):
        side_triton.add_head_delta(case.tables, case.slots, x.half(), logits)
    with pytest.raises(ValueError, match=r"\(11, 2099\) of torch.float32, contiguous, is needed"):
        side_triton.add_head_delta(case.tables, case.slots, x, logits[:, 1:])
    own = RowWeights(torch.ones(60), case.slots[1:], case.tables.norms[:, 0], case.tables.pool)
    with pytest.raises(RuntimeError, match="do not fit 11 rows"):
        norm_triton.rms_norm(x, own, 1e-5)
