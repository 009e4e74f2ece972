"""Makes a backend out of a model's folder. Imports torch: only for whoever is about to load one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.backend import Backend, ModelFacts
from deltaplane_server.config import EngineConfig
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.execution.device import resolve_device, resolve_dtype, resolve_num_threads
from deltaplane_server.execution.setup import set_up
from deltaplane_server.models.config import DecoderConfig, load_decoder_config
from deltaplane_server.models.weights import Checkpoint


def load_backend(config: EngineConfig, folder: Path) -> Backend:
    """Loads the model and the tokenizer in `folder`, and takes all the memory that serving will need.

    Errors: StartupError, and InvalidArgumentError where the model or its size is not served.
    """
    torch.set_num_threads(resolve_num_threads(config.num_threads))
    model = load_decoder_config(folder, config.max_model_len)
    device = resolve_device(config.device)
    checkpoint = Checkpoint.open(folder)
    dtype = resolve_dtype(config.dtype, device, checkpoint.dtype)
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer-load") as beside:
        tokenizer = beside.submit(Tokenizer.load, folder)
        execution = set_up(config, model, checkpoint, dtype, device)
        return Backend(
            facts=_facts(model, dtype, device),
            tokenizer=tokenizer.result(),
            runner=execution.runner,
            loader=PeftLoader(
                model.adapter_layout(),
                max_lora_rank=config.max_lora_rank,
                dtype=dtype,
                pin_memory=device.type == "cuda",
            ),
            pool=execution.pool,
            scheduler=execution.scheduler,
            memory={
                share.purpose.replace(" ", "_").lower(): share.nbytes for share in execution.memory.shares
            },
        )


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
