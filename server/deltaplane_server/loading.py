"""Makes a backend out of a model's folder. Imports torch: only for whoever is about to load one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
import torch

from deltaplane_controlplane.ports import rank_pages
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_server.adapters.adapter_pool import AdapterPool
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.backend import Backend, ModelFacts
from deltaplane_server.config import EngineConfig
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.execution.device import resolve_device, resolve_dtype, resolve_num_threads
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.memory import MemoryPlan, memory_budget, plan_memory
from deltaplane_server.execution.runner import ModelRunner
from deltaplane_server.models.config import DecoderConfig, load_decoder_config
from deltaplane_server.models.decoder import Decoder, decoder_bytes
from deltaplane_server.models.weights import Checkpoint
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig

_MIB = 1 << 20

log = structlog.get_logger(__name__)


def load_backend(config: EngineConfig, folder: Path) -> Backend:
    """Loads the model and the tokenizer in `folder`, and takes all the memory that serving will need.

    Errors: StartupError, and InvalidArgumentError where the model or its size is not served.
    """
    torch.set_num_threads(resolve_num_threads(config.num_threads))
    model = load_decoder_config(folder, config.max_model_len)
    device = resolve_device(config.device)
    checkpoint = Checkpoint.open(folder)
    dtype = resolve_dtype(config.dtype, device, checkpoint.dtype)
    plan = _plan(config, model, checkpoint, dtype, device)
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer-load") as beside:
        tokenizer = beside.submit(Tokenizer.load, folder)
        decoder = Decoder(model, checkpoint, dtype, device)
        pool = AdapterPool(RankPagePool(model.adapter_layout(), *_pool_size(config), dtype, device))
        kv_cache = KVCache(
            model, num_pages=plan.num_kv_pages, page_size=config.page_size, dtype=dtype, device=device
        )
        return Backend(
            facts=_facts(model, dtype, device),
            tokenizer=tokenizer.result(),
            runner=ModelRunner(decoder, kv_cache, pool if config.enable_lora else None),
            loader=PeftLoader(
                model.adapter_layout(),
                max_lora_rank=config.max_lora_rank,
                dtype=dtype,
                pin_memory=device.type == "cuda",
            ),
            pool=pool,
            scheduler=SchedulerConfig.of(
                config, max_model_len=model.max_model_len, num_pages=plan.num_kv_pages
            ),
            memory={share.purpose.replace(" ", "_").lower(): share.nbytes for share in plan.shares},
        )


def _plan(
    config: EngineConfig,
    model: DecoderConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryPlan:
    num_pages, _ = _pool_size(config)
    plan = plan_memory(
        config,
        model,
        memory_budget(config, device),
        weight_bytes=decoder_bytes(model, checkpoint, dtype, device),
        adapter_bytes=num_pages * RankPageLayout(model.adapter_layout()).page_bytes(dtype),
        dtype=dtype,
    )
    shares = {share.purpose.replace(" ", "_"): f"{share.nbytes / _MIB:.0f} MiB" for share in plan.shares}
    log.info("server.memory", device=str(device), dtype=_name(dtype), **shares)
    return plan


def _pool_size(config: EngineConfig) -> tuple[int, int]:
    """Rank pages and slots."""
    if not config.enable_lora:
        return 0, 0
    num_pages = config.adapter_pages or config.max_loras * rank_pages(config.max_lora_rank)
    return num_pages, config.max_loras


def _facts(model: DecoderConfig, dtype: torch.dtype, device: torch.device) -> ModelFacts:
    return ModelFacts(
        architecture=model.architecture,
        dtype=_name(dtype),
        device=str(device),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        eos_token_ids=model.eos_token_ids,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
