"""Makes a backend out of a model's folder. Imports torch: only for whoever is about to load one."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
import torch

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.manager import LOADER_THREADS
from deltaplane_kernels.rank_pages import RankPageLayout, rank_pages
from deltaplane_server.adapters.host_pages import HostPages
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.backend import Backend, ModelFacts
from deltaplane_server.config import EngineConfig
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.execution.device import resolve_device, resolve_dtype, resolve_num_threads
from deltaplane_server.execution.host_memory import available_memory
from deltaplane_server.execution.setup import set_up
from deltaplane_server.models.config import DecoderConfig, load_decoder_config
from deltaplane_server.models.weights import Checkpoint

log = structlog.get_logger(__name__)


def load_backend(config: EngineConfig, folder: Path) -> Backend:
    """Loads the model and the tokenizer in `folder`, and takes all the memory that serving will need.

    Errors: StartupError, and InvalidArgumentError where the model or its size is not served.
    """
    device = resolve_device(config.device)
    torch.set_num_threads(_num_threads(config, device))
    model = load_decoder_config(folder, config.max_model_len)
    checkpoint = Checkpoint.open(folder)
    dtype = resolve_dtype(config.dtype, device, checkpoint.dtype)
    with ThreadPoolExecutor(2, thread_name_prefix="load-beside") as beside:
        tokenizer = beside.submit(Tokenizer.load, folder)
        host_pages = beside.submit(_host_pages, config, model, dtype, device)
        execution = set_up(config, model, checkpoint, dtype, device)
        return Backend(
            facts=_facts(model, dtype, device),
            tokenizer=tokenizer.result(),
            runner=execution.runner,
            loader=PeftLoader(
                model.adapter_layout(),
                max_lora_rank=config.max_lora_rank,
                dtype=dtype,
                base=execution.base,
                host_pages=host_pages.result(),
            ),
            pool=execution.pool,
            scheduler=execution.scheduler,
            memory={
                share.purpose.replace(" ", "_").lower(): share.nbytes for share in execution.memory.shares
            },
        )


def _num_threads(config: EngineConfig, device: torch.device) -> int:
    """Threads of an operation on the CPU. Beside a GPU these are those of loads alone, which have threads of
    their own and are to leave the others their cores."""
    if device.type == "cuda" and config.num_threads is None:
        return 1
    return resolve_num_threads(config.num_threads)


def _host_pages(
    config: EngineConfig, model: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> HostPages | None:
    """For the host cache of adapters and what loads pack on top of it; None where nothing is copied.

    Errors: InvalidArgumentError where the machine has less memory.
    """
    if device.type == "cpu" or not config.enable_lora:
        return None
    layout = RankPageLayout(model.adapter_layout())
    page_bytes = layout.page_bytes(dtype)
    num_pages = config.host_cache_bytes(page_bytes) // page_bytes
    num_pages += LOADER_THREADS * rank_pages(config.max_lora_rank)
    needed, available = num_pages * page_bytes, available_memory()
    if needed > available:
        raise InvalidArgumentError.for_field(
            "max_cpu_loras_bytes" if config.max_cpu_loras is None else "max_cpu_loras",
            f"the host cache of adapters takes {needed} bytes, {available} are available; ask for less",
        )
    begin = time.monotonic()
    pages = HostPages(num_pages, layout.page_elements, dtype, pin_memory=True)
    log.info(
        "server.host_cache",
        seconds=round(time.monotonic() - begin, 2),
        pinned=f"{needed / (1 << 20):.0f} MiB",
    )
    return pages


def _facts(model: DecoderConfig, dtype: torch.dtype, device: torch.device) -> ModelFacts:
    return ModelFacts(
        architecture=model.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        eos_token_ids=model.eos_token_ids,
    )
