"""What GetModel tells."""

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_server.backend import ModelFacts
from deltaplane_server.config import EngineConfig
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from deltaplane_server.version import VERSION


def model_card(
    config: EngineConfig, facts: ModelFacts, limits: RequestLimits, scheduler: SchedulerConfig
) -> pb.Model:
    """The base model as it is served, and how large a request may be."""
    return pb.Model(
        name=config.served_model_name,
        architecture=facts.architecture,
        dtype=facts.dtype,
        device=facts.device,
        vocab_size=facts.vocab_size,
        max_model_len=limits.max_sequence_tokens,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        eos_token_ids=sorted(facts.eos_token_ids),
        has_chat_template=limits.has_chat_template,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        max_outputs=limits.max_outputs,
        max_logprobs=limits.max_logprobs,
        max_stop_strings=limits.max_stop_strings,
        max_stop_string_length=limits.max_stop_string_length,
        kv_page_size=scheduler.page_size,
        kv_pages=scheduler.num_pages,
        server_version=VERSION,
        max_composition_rows=limits.max_composition_rows,
    )
