"""One decoder for Llama, Mistral, Qwen2 and Qwen3: pre-norm, rotary, grouped-query attention, gated MLP.

The families differ in DecoderConfig alone. A step's tokens are rows of one matrix, whichever sequences they
belong to; only attention knows which ones.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from deltaplane_kernels.activation import silu_mul
from deltaplane_kernels.attention import AttentionPlan, paged_attention, rotary_write_kv
from deltaplane_kernels.layout import PackedLinear
from deltaplane_kernels.linear import BaseProduct, Linear
from deltaplane_kernels.norm import NormWeight, add_rms_norm, rms_norm
from deltaplane_kernels.rotary import rotary_factors
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.models.weights import WeightSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class ReadRows(Protocol):
    def __call__(self, *names: str) -> Tensor:
        """Tensors of the checkpoint below each other, in the decoder's dtype and on its device."""
        ...


class SideStep(Protocol):
    """What the adapters of some rows do outside the linears of the layers (see kernels.side)."""

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Makes x [T, hidden_size], the base's embedding of tokens [T], that of the rows' adapters."""
        ...

    def norm_weight(self, norm: str, weight: Tensor) -> NormWeight:
        """The weights of the rows in a norm ("layers.0.input_layernorm"), where the base has `weight`."""
        ...

    def add_head_delta(self, x: Tensor, logits: Tensor) -> None:
        """logits += B(A x) in the rows that have LoRA on the head. x: [R, hidden_size]."""
        ...

    def at(self, rows: Tensor) -> "SideStep":
        """The same for rows [R] of these."""
        ...


class LoraStep(Protocol):
    """The deltas of one step."""

    @property
    def side(self) -> SideStep | None:
        """What is outside the linears; None where no adapter of the step has anything there."""
        ...

    def base_product(self, layer: int, linear: str, x: Tensor, base: BaseProduct) -> Tensor:
        """base(x), and what add_delta of the same x, the next call, needs no y for."""
        ...

    def add_delta(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None:
        """y += B(A x) in the rows that have an adapter. x: [T, in], y: [T, out] of that packed linear."""
        ...

    def add_delta_rms_norm(
        self, layer: int, linear: str, x: Tensor, y: Tensor, residual: Tensor, weight: NormWeight, eps: float
    ) -> Tensor:
        """The same to a block's output; returns add_rms_norm of that y, which is left open itself."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """The tokens of one step.

    tokens, positions: [T], int64; positions may be int32.
    attention: where they stand in the KV pages.
    lora: the deltas; None for a step of the base model alone.
    """

    tokens: Tensor
    positions: Tensor
    attention: AttentionPlan
    lora: LoraStep | None = None

    @property
    def side(self) -> SideStep | None:
        return self.lora.side if self.lora is not None else None


class Decoder:
    """The frozen base model on one device.

    dtype: of weights and activations. The embedding table stays in the checkpoint's dtype and its rows are
    cast when they are looked up, which gives the same values.
    """

    def __init__(
        self, config: DecoderConfig, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Reads the weights straight into the packed linears: no second copy of the model arises.

        On a GPU they are being read when this returns, and whole after checkpoint.finish().
        Errors: InvalidArgumentError when the checkpoint does not fit the config.
        """
        checkpoint.check(config.tensor_shapes(), optional=(HEAD,))
        self.config = config
        self.dtype = dtype
        self.device = device
        read = partial(checkpoint.read_rows, dtype=dtype, device=device)
        self._embedding = checkpoint.read_rows(EMBEDDING, dtype=checkpoint.dtype_of(EMBEDDING), device=device)
        self._inv_freq = torch.tensor(config.rope.inv_freq, dtype=torch.float32, device=device)
        self._layers = [DecoderLayer(config, index, read) for index in range(config.num_layers)]
        self._norm = Norm("norm", config.rms_norm_eps, read)
        # transformers, too, takes a head that is there, even if the config says that it is tied.
        self._has_own_head = HEAD in checkpoint
        shares_table = not self._has_own_head and dtype == self._embedding.dtype
        head = HEAD if self._has_own_head else EMBEDDING
        self._head = Linear(self._embedding if shares_table else read(head))

    def linear(self, layer: int, name: str) -> Linear:
        """A packed linear of a layer, by its name in the adapter layout."""
        return self._layers[layer].linear(name)

    def table(self, module: str) -> Tensor:
        """The weight of "embed_tokens" or "lm_head", [vocab_size, hidden_size], of the checkpoint's or this
        decoder's dtype: where it lies, or a copy of a head in a layout of its own."""
        if module == "embed_tokens" or not self._has_own_head:
            return self._embedding
        return self._head.rows(0, self.config.vocab_size)

    def forward(self, inputs: DecoderInputs, pages: Tensor) -> Tensor:
        """The hidden states after the last layer; writes the keys and values of the step's tokens.

        pages: [num_pages, num_layers, 2, Hkv, page_size, D] of this decoder's dtype (see kernels.attention).
        Returns [T, hidden_size].
        """
        x = self._embedding.index_select(0, inputs.tokens).to(self.dtype)
        if inputs.side is not None:
            inputs.side.embed(inputs.tokens, x)
        residual = torch.zeros_like(x)
        rotary = rotary_factors(inputs.positions, self._inv_freq, self.config.rope.scaling, self.dtype)
        addend = Addend(x)
        for layer, kv in zip(self._layers, pages.unbind(1), strict=True):
            addend = layer.forward(addend, residual, rotary, inputs, kv)
        return addend.add_to(residual)

    def logits(self, hidden: Tensor, out: Tensor | None = None, *, side: SideStep | None = None) -> Tensor:
        """hidden: [R, hidden_size], rows of what forward() returned. side: of these rows.

        Returns [R, vocab_size]: `out`, of this decoder's dtype, where it is given; else a new tensor of
        float32, with the same values.
        """
        normed = self._norm(hidden, side)
        logits = self._head(normed, out)
        if side is not None:
            side.add_head_delta(normed, logits)
        return logits.float() if out is None else logits


def decoder_bytes(
    config: DecoderConfig, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes that the weights of a Decoder take."""
    shapes = config.tensor_shapes()
    table = math.prod(shapes.pop(EMBEDDING))
    shapes.pop(HEAD, None)
    # A CPU keeps the head in a layout of its own; elsewhere tied embeddings of the same dtype are one tensor.
    shares_table = HEAD not in checkpoint and device.type != "cpu" and dtype == checkpoint.dtype
    head = 0 if shares_table else table * dtype.itemsize
    return table * checkpoint.dtype.itemsize + head + sum(map(math.prod, shapes.values())) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Delta:
    """What `lora` has begun for a packed linear of a layer, with input x, and has not added yet."""

    lora: LoraStep
    layer: int
    linear: str
    x: Tensor


@dataclass(frozen=True, slots=True)
class Addend:
    """What the residual stream still lacks: y [T, hidden_size], and the delta that y still lacks, if any."""

    y: Tensor
    delta: Delta | None = None

    def add_to(self, residual: Tensor) -> Tensor:
        """Changes residual in place and returns it."""
        if self.delta is not None:
            self.delta.lora.add_delta(self.delta.layer, self.delta.linear, self.delta.x, self.y)
        return residual.add_(self.y)

    def add_rms_norm(self, residual: Tensor, weight: NormWeight, eps: float) -> Tensor:
        """add_to(residual), and its norm. See kernels.norm.add_rms_norm."""
        if (delta := self.delta) is None:
            return add_rms_norm(self.y, residual, weight, eps)
        return delta.lora.add_delta_rms_norm(
            delta.layer, delta.linear, delta.x, self.y, residual, weight, eps
        )


class Norm:
    """A root-mean-square norm. path: in the model, without "model."."""

    def __init__(self, path: str, eps: float, read: ReadRows) -> None:
        self._path = path
        self._eps = eps
        self._weight = read(f"model.{path}.weight")

    def __call__(self, x: Tensor, side: SideStep | None) -> Tensor:
        """See kernels.norm.rms_norm. side: of the rows of x."""
        return rms_norm(x, self._weight_of(side), self._eps)

    def of_sum(self, addend: Addend, residual: Tensor, side: SideStep | None) -> Tensor:
        """Adds to residual [T, hidden_size] in place, and returns the norm of that."""
        return addend.add_rms_norm(residual, self._weight_of(side), self._eps)

    def _weight_of(self, side: SideStep | None) -> NormWeight:
        return self._weight if side is None else side.norm_weight(self._path, self._weight)


class DecoderLayer:
    """Attention and MLP, each behind a norm. What a block computes is added to the residual stream together
    with the next norm, so forward() takes what the block before it has left to add and returns the same.
    """

    def __init__(self, config: DecoderConfig, index: int, read: ReadRows) -> None:
        prefix = f"model.layers.{index}"
        self._index = index
        self._window = config.windows[index]
        self._head_dim = config.head_dim
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._linears = {
            linear.name: _read_linear(linear, prefix, config.has_bias(linear.name), read)
            for linear in config.adapter_layout().linears
        }
        norm = partial(Norm, eps=config.rms_norm_eps, read=read)
        path = f"layers.{index}"
        self._input_norm = norm(f"{path}.input_layernorm")
        self._post_attention_norm = norm(f"{path}.post_attention_layernorm")
        self._qk_norm = (
            (norm(f"{path}.self_attn.q_norm"), norm(f"{path}.self_attn.k_norm")) if config.qk_norm else None
        )

    def linear(self, name: str) -> Linear:
        return self._linears[name]

    def forward(
        self,
        addend: Addend,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        inputs: DecoderInputs,
        kv: Tensor,
    ) -> Addend:
        """residual: [T, hidden_size]; kv: [num_pages, 2, Hkv, page_size, D]."""
        x = self._input_norm.of_sum(addend, residual, inputs.side)
        addend = self._attention(x, rotary, inputs, kv)
        x = self._post_attention_norm.of_sum(addend, residual, inputs.side)
        x = silu_mul(self._linear("gate_up_proj", x, inputs.lora))
        return self._output("down_proj", x, inputs.lora)

    def _attention(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], inputs: DecoderInputs, kv: Tensor
    ) -> Addend:
        heads = self._linear("qkv_proj", x, inputs.lora).view(x.shape[0], -1, self._head_dim)
        queries, keys = heads[:, : self._num_heads], heads[:, self._num_heads : -self._num_kv_heads]
        if self._qk_norm is not None:
            q_norm, k_norm = self._qk_norm
            queries.copy_(q_norm(queries, inputs.side))
            keys.copy_(k_norm(keys, inputs.side))
        rotary_write_kv(heads, *rotary, kv, inputs.attention)
        return self._output(
            "o_proj", paged_attention(queries, kv, inputs.attention, self._window), inputs.lora
        )

    def _output(self, name: str, x: Tensor, lora: LoraStep | None) -> Addend:
        """Of a block, by its last linear."""
        y = self._base_linear(name, x, lora)
        return Addend(y, None if lora is None else Delta(lora, self._index, name, x))

    def _linear(self, name: str, x: Tensor, lora: LoraStep | None) -> Tensor:
        y = self._base_linear(name, x, lora)
        if lora is not None:
            lora.add_delta(self._index, name, x, y)
        return y

    def _base_linear(self, name: str, x: Tensor, lora: LoraStep | None) -> Tensor:
        """The base model's product, to which `lora` has its delta to add."""
        base = self._linears[name]
        return base(x) if lora is None else lora.base_product(self._index, name, x, base)


def _read_linear(linear: PackedLinear, prefix: str, has_bias: bool, read: ReadRows) -> Linear:
    modules = [f"{prefix}.{part.module}" for part in linear.slices]
    bias = read(*(f"{module}.bias" for module in modules)) if has_bias else None
    return Linear(read(*(f"{module}.weight" for module in modules)), bias)
