"""Attention over KV pages on a GPU: of decodes in CUDA C++ where that takes them, of all else in Triton.

Launches depend on the room of the index alone: how many sequences there are, their lengths and their block
tables are read on the device, so a CUDA graph serves any.
"""

from torch import Tensor

from deltaplane_kernels import attention_cuda, attention_triton
from deltaplane_kernels.attention_index import AttentionIndex


def paged_attention(
    q: Tensor, kv: Tensor, index: AttentionIndex, window: int | None = None, out: Tensor | None = None
) -> Tensor:
    """As attention.paged_attention. Slots of a page that are not written yet are not read.

    out: [T, Hq * D], contiguous, in the dtype of q; a new tensor where it is None.
    Errors: RuntimeError when q does not fit index and kv.
    """
    num_tokens, num_kv_heads, head_dim = index.slots.shape[0], kv.shape[2], kv.shape[4]
    if (q.shape[0], q.shape[2]) != (num_tokens, head_dim) or q.shape[1] % num_kv_heads or q.dtype != kv.dtype:
        raise RuntimeError(
            f"q {tuple(q.shape)} of {q.dtype} does not fit {num_tokens} tokens and kv {tuple(kv.shape)} of "
            f"{kv.dtype}"
        )
    if q.stride(1) != head_dim or q.stride(2) != 1:
        q = q.contiguous()
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
    if index.max_decodes:
        kernels = attention_cuda if attention_cuda.takes(q, kv) else attention_triton
        kernels.launch_decode(out, q, kv, index, window)
    if index.max_prefills:
        attention_triton.launch_prefill(out, q, kv, index, window)
    return out
