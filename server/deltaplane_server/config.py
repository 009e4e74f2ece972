"""How an engine is set up: made once from the command line, never changed after."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and sizes of one engine. Sizes are in bytes, tokens or pages as named.

    dtype: "auto", "float32", "bfloat16" or "float16"; auto is float32 on a CPU, else the model's own.
    max_num_batched_tokens: the token budget of a step, decode tokens included.
    kv_cache_bytes: memory of KV pages; None fits it to the device (see execution.memory).
    max_loras: slots on the device, and so the most distinct adapters in a step.
    max_cpu_loras_bytes: bound of the host cache of adapters.
    adapter_pages: rank pages on the device; None gives each slot ceil(max_lora_rank / 8).
    max_waiting: requests that may wait before new ones are refused.
    """

    model: str
    served_model_name: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    page_size: int = 16
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = False
    enable_lora: bool = True
    max_loras: int = 4
    max_lora_rank: int = 16
    adapter_pages: int | None = None
    max_cpu_loras_bytes: int = 1 << 30
    max_waiting: int = 1024
    seed: int = 0
    num_threads: int | None = None
