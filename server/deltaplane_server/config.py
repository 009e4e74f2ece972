"""How an engine and its server are set up: made once from the command line, never changed after."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deltaplane_controlplane.ports import rank_pages
from deltaplane_server.adapters.remote.addresses import Address


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and sizes of one engine. Sizes are in bytes, tokens or pages as named.

    dtype: "auto", "float32", "bfloat16" or "float16"; auto is float32 on a CPU, else the model's own.
    max_num_batched_tokens: the token budget of a step, decode tokens included.
    kv_cache_bytes: memory of KV pages; None fits it to the device (see execution.memory).
    max_loras: slots on the device, and so the most distinct adapters in a step.
    max_cpu_loras_bytes: bound of the host cache of adapters.
    max_cpu_loras: bounds it to this many adapters of the highest rank in place of max_cpu_loras_bytes.
    adapter_pages: rank pages on the device; None gives each slot those of the highest rank.
    seed: makes the draws of requests that bring no seed repeatable, as long as they come in the same order;
        None leaves them random.
    max_waiting: requests that may wait before new ones are refused.
    num_threads: CPU threads of a step; None is all cores but one (see execution.device), and 1 beside a GPU.
    enforce_eager: no CUDA graphs: a GPU starts sooner and decodes more slowly.

    What is sized by the highest rank is for LoRA alone, ceil(max_lora_rank / 8) pages an adapter: DoRA and
    biases take a row more each (see ports.rank_pages), and so a page where the last one is full. All slots
    can hold such adapters at once where adapter_pages says so.
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
    max_cpu_loras: int | None = None
    max_waiting: int = 1024
    seed: int | None = None
    num_threads: int | None = None
    enforce_eager: bool = False

    @property
    def num_adapter_pages(self) -> int:
        """Rank pages on the device."""
        if self.adapter_pages is not None:
            return self.adapter_pages
        return self.max_loras * rank_pages(self.max_lora_rank)

    def host_cache_bytes(self, page_bytes: int) -> int:
        """Bound of the host cache of adapters. page_bytes: of a rank page."""
        if self.max_cpu_loras is None:
            return self.max_cpu_loras_bytes
        return self.max_cpu_loras * rank_pages(self.max_lora_rank) * page_bytes


class LogFormat(Enum):
    JSON = "json"
    CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to register at start: its name, and the folder or the remote address with its files."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One process: both planes, the HTTP port, logs and the catalogue.

    port, admin_port, http_port: 0 takes a free one; `ports_file` then tells which, as JSON.
    state: the SQLite file of the catalogue, or ":memory:".
    upload_dir: keeps uploaded and fetched adapters; None keeps them beside the catalogue's file, and as long
        as it.
    lora_modules: registered before the server is ready, and loaded as far as there are slots.
    adapter_roots: folders from which the control plane may register adapters, beside lora_modules' own.
    adapter_sources: what remote adapters may lie under that the control plane registers, beside lora_modules'
        own addresses.
    fetch_timeout_s: seconds that fetching an adapter from a remote place may take.
    max_watches: WatchAdapters streams of the control plane at once.
    drain_timeout_s: seconds that running streams get at shutdown.
    tls_cert_file, tls_key_file: in PEM; both ports of gRPC then speak TLS. Both or none.
    tls_client_ca_file: authorities, in PEM, one of which must have signed a client's certificate.
    admin_tls_client_ca_file: takes the former's place on the control plane.
    api_token_file, admin_token_file: the tokens of which a call to the data plane, or to the control plane,
        must bring one.
    allow_insecure_admin: serve the control plane beyond this machine without a token or client certificates.
    log_prompts: put prompts as they came into the request log; off, no log holds text of a prompt.
    """

    engine: EngineConfig
    host: str = "0.0.0.0"
    port: int = 50051
    admin_host: str = "127.0.0.1"
    admin_port: int = 50052
    http_host: str = "0.0.0.0"
    http_port: int = 9400
    state: str = ":memory:"
    upload_dir: Path | None = None
    lora_modules: tuple[LoraModule, ...] = ()
    adapter_roots: tuple[Path, ...] = ()
    adapter_sources: tuple[Address, ...] = ()
    fetch_timeout_s: float = 1800.0
    max_watches: int = 1024
    drain_timeout_s: float = 30.0
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    admin_tls_client_ca_file: Path | None = None
    api_token_file: Path | None = None
    admin_token_file: Path | None = None
    allow_insecure_admin: bool = False
    ports_file: Path | None = None
    log_format: LogFormat = LogFormat.CONSOLE
    log_level: str = "info"
    log_prompts: bool = False
    vllm_metrics: bool = False

    @property
    def upload_folder(self) -> Path | None:
        """Where uploaded and fetched adapters are kept; None is a temporary folder."""
        if self.upload_dir is not None or self.state == ":memory:":
            return self.upload_dir
        return Path(f"{self.state}.uploads")
