"""The scheduler's limits, and which requests can be served within them at all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.config import EngineConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: the most sequences in a step.
    max_num_batched_tokens: the token budget of a step (see max_step_tokens).
    max_model_len: tokens of prompt and output together that the model knows.
    num_pages, page_size: KV pages in all, and the tokens that each holds.
    max_loras: slots of the device.
    ageing_s: seconds that a sequence is passed over, for want of a slot or of KV pages, before others are
        held back for it.
    tenant_weights: shares of tenants where they are not 1 (see FairQueue).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int = 16
    max_loras: int = 4
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    ageing_s: float = 1.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "num_pages", "page_size"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError.for_field(name, f"must be at least 1; got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgumentError.for_field(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} leaves no token of a step for each of max_num_seqs = "
                f"{self.max_num_seqs} sequences; raise it or lower max_num_seqs",
            )

    @classmethod
    def of(cls, config: EngineConfig, *, max_model_len: int, num_pages: int) -> "SchedulerConfig":
        """The part of an engine's configuration that the scheduler needs, with what the model and the
        device's memory made of it."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=config.page_size,
            max_loras=config.max_loras,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_prefix_caching=config.enable_prefix_caching,
        )

    @property
    def max_step_tokens(self) -> int:
        """The most tokens in a step: the budget, raised without chunked prefill so that the longest prompt
        fits beside the decodes."""
        if self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens, self.max_model_len + self.max_num_seqs)

    @property
    def kv_tokens(self) -> int:
        """Tokens that all KV pages together hold."""
        return self.num_pages * self.page_size

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and output together that can be served at all."""
        return min(self.max_model_len, self.kv_tokens)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Errors: InvalidArgumentError for "prompt" or "stop.max_tokens" where they fit neither the model's
        length nor all KV pages, or where there is nothing to compute."""
        limit = self.max_sequence_tokens
        if limit == self.max_model_len:
            what = f"the model's length of {limit} tokens"
        else:
            what = f"the {limit} tokens that all KV pages together hold"
        if num_prompt_tokens < 1:
            raise InvalidArgumentError.for_field("prompt", "is empty; give at least one token")
        if num_prompt_tokens + 1 > limit:
            raise InvalidArgumentError.for_field(
                "prompt",
                f"has {num_prompt_tokens} tokens, and with one token of output that is above {what}; "
                f"shorten it to at most {limit - 1}",
            )
        if max_tokens < 1:
            raise InvalidArgumentError.for_field("stop.max_tokens", f"must be at least 1; got {max_tokens}")
        if num_prompt_tokens + max_tokens > limit:
            raise InvalidArgumentError.for_field(
                "stop.max_tokens",
                f"{max_tokens} and a prompt of {num_prompt_tokens} tokens are above {what}; lower it to at "
                f"most {limit - num_prompt_tokens}",
            )
