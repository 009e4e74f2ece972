"""The KV pages of all layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltaplane_kernels.attention import KVLayout
from deltaplane_server.models.config import DecoderConfig


def kv_page_bytes(model: DecoderConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: page_size tokens' keys and values in every layer."""
    return model.num_layers * 2 * model.num_kv_heads * page_size * model.head_dim * dtype.itemsize


class KVCache:
    """pages: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim] (see kernels.attention).

    On a CPU the operating system commits the memory as pages are first written.
    """

    def __init__(
        self,
        model: DecoderConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = KVLayout(model.num_layers, model.num_kv_heads, page_size, model.head_dim)
        self.pages: Tensor = torch.empty(
            (num_pages, model.num_layers, 2, model.num_kv_heads, page_size, model.head_dim),
            dtype=dtype,
            device=device,
        )

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages whose first token is about to be written.

        Attention masks the slots of a page that are not written yet, but 0 * NaN is NaN: without this, what
        the page's last owner left could reach the next one.
        """
        if pages:
            self.pages.index_fill_(0, torch.tensor(pages, device=self.pages.device), 0)
