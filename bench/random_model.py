"""A model and adapters that exist nowhere: real shapes, random numbers, drawn where they are used."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS, RankPageLayout, SliceRows, rank_pages
from deltaplane_server.adapters.packing import PackedAdapter
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.models.rope import Rope


def llama_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    max_model_len: int,
) -> DecoderConfig:
    """A Llama with heads of hidden_size / num_heads, an untied head, and rope_theta 500000."""
    head_dim = hidden_size // num_heads
    inv_freq = tuple(500_000.0 ** (-i / head_dim) for i in range(0, head_dim, 2))
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_model_len=max_model_len,
        rope=Rope(inv_freq, 1.0),
        windows=(None,) * num_layers,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        eos_token_ids=frozenset(),
    )


LLAMA_3_8B = llama_config(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_model_len=8192,
)
TINY = llama_config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_model_len=512,
)


class RandomWeights:
    """A models.weights.WeightSource that draws each tensor on the device when it is read.

    Matrices keep the variance of what they multiply; vectors, the weights of norms, are ones.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._shapes = config.tensor_shapes()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()) -> None:
        if self._shapes != expected:
            raise ValueError("random weights were made for another config")

    def read_rows(self, *names: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        shapes = [self._shapes[name] for name in names]
        rows = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=device)
        return rows.normal_(0.0, rows.shape[1] ** -0.5) if rows.dim() == 2 else rows.fill_(1.0)

    def finish(self) -> None:
        pass


def random_adapter(
    config: DecoderConfig, rank: int, dtype: torch.dtype, device: torch.device
) -> PackedAdapter:
    """An adapter of `rank` on all linears, as PeftLoader packs one; drawn on the device, kept on the host."""
    layout = RankPageLayout(config.adapter_layout())
    pages = torch.empty(rank_pages(rank), layout.page_elements, dtype=dtype, device=device)
    pages.normal_(0.0, 0.1 / math.sqrt(config.hidden_size))
    _clear_rows_above(pages, rank, layout)
    rows = [[SliceRows(rank)] * layout.slices_per_layer for _ in range(layout.num_layers)]
    host = torch.empty(pages.shape, dtype=dtype, pin_memory=device.type == "cuda")
    return PackedAdapter(host.copy_(pages), rows, read_ms=0.0, pack_ms=0.0)


def _clear_rows_above(pages: Tensor, rank: int, layout: RankPageLayout) -> None:
    used = rank - (len(pages) - 1) * RANK_PAGE_ROWS
    if used == RANK_PAGE_ROWS:
        return
    for layer in range(layout.num_layers):
        for name, place in layout.placements.items():
            layout.a(pages, layer, name)[-1, :, used:] = 0
            for index in range(len(place.linear.slices)):
                layout.b(pages, layer, name, index)[-1, used:] = 0


def step_bytes(
    config: DecoderConfig, dtype: torch.dtype, *, batch: int, context: int, adapters: int, rank: int
) -> int:
    """The bytes that a decode step must read at least: each weight that it uses, the KV of `batch` sequences
    of `context` tokens, and the rank rows of `adapters` distinct adapters."""
    linears = config.adapter_layout().linears
    per_layer = sum(linear.in_features * linear.out_features for linear in linears)
    rank_row = sum(part.out_features + linear.in_features for linear in linears for part in linear.slices)
    kv_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    elements = (
        config.num_layers * (per_layer + adapters * rank * rank_row)
        + config.vocab_size * config.hidden_size
        + batch * context * kv_token
    )
    return elements * dtype.itemsize
