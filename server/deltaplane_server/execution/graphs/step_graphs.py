"""All CUDA graphs of a server, and the memory that they take."""

from dataclasses import dataclass

import torch

from deltaplane_server.execution.graphs.decode_graphs import DecodeGraphs, batch_sizes
from deltaplane_server.execution.graphs.graph_set import GraphInputs, max_pages
from deltaplane_server.execution.graphs.prompt_graphs import PromptGraphs, step_sizes
from deltaplane_server.execution.graphs.recorder import GraphRecorder
from deltaplane_server.models.config import DecoderConfig

_GRAPH_BYTES = 12 << 20
"""Device memory that the driver takes for a graph, generously."""

_SPLIT_PROGRAMS = 640
"""Programs for each KV head, beside one for each decode, that share out the keys of decodes on GPUs of up to
160 multiprocessors (see kernels.attention_index)."""


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """decodes: of steps of decodes alone. prompts: of others."""

    decodes: DecodeGraphs
    prompts: PromptGraphs

    @classmethod
    @torch.inference_mode()
    def capture(cls, inputs: GraphInputs, *, max_num_seqs: int, max_step_tokens: int) -> "StepGraphs":
        """The feed of `inputs` holds max_graph_tokens() tokens."""
        recorder = GraphRecorder(inputs.decoder.device)
        prompts = PromptGraphs(inputs, recorder, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens)
        return cls(DecodeGraphs(inputs, recorder, max_num_seqs=max_num_seqs), prompts)


def max_graph_tokens(max_num_seqs: int, max_step_tokens: int) -> int:
    """Rows of the largest graph."""
    return max(batch_sizes(max_num_seqs)[-1], step_sizes(max_step_tokens)[-1])


def graph_bytes(
    model: DecoderConfig,
    max_num_seqs: int,
    max_step_tokens: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    with_lora: bool,
) -> int:
    """The most memory that StepGraphs take: tensors, and graphs with LoRA and without."""
    num_graphs = (len(batch_sizes(max_num_seqs)) + len(step_sizes(max_step_tokens))) * (1 + with_lora)
    tensors = tensor_bytes(model, max_num_seqs, max_step_tokens, page_size, dtype)
    return tensors + num_graphs * _GRAPH_BYTES


def tensor_bytes(
    model: DecoderConfig, max_num_seqs: int, max_step_tokens: int, page_size: int, dtype: torch.dtype
) -> int:
    """Inputs and outputs, partial results of attention, and what the largest step computes, which the smaller
    ones share."""
    batch, step = batch_sizes(max_num_seqs)[-1], step_sizes(max_step_tokens)[-1]
    attention = _attention_bytes(model, batch, batch, page_size)
    attention += _attention_bytes(model, step, min(max_num_seqs, step) + 1, page_size)
    outputs = batch * model.vocab_size + step * model.hidden_size
    q_size = model.num_heads * model.head_dim
    activations = max(batch, step) * (8 * model.hidden_size + 8 * q_size + 4 * model.intermediate_size)
    return attention + (outputs + activations) * dtype.itemsize


def _attention_bytes(model: DecoderConfig, rows: int, sequences: int, page_size: int) -> int:
    """Of an IndexBuffer with its workspace, and of the tokens of a step."""
    index = 4 * rows + sequences * (4 + model.num_kv_heads + max_pages(model, page_size))
    programs = max(4 * sequences, sequences + _SPLIT_PROGRAMS)
    partials = programs * model.num_heads * (model.head_dim + 2)
    return 4 * (index + partials)
