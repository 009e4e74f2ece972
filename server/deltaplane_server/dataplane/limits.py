"""What a request may ask for, given the model and the memory it is served from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of a GenerateRequest; GetModel tells them to clients.

    vocab_size: token ids are below this.
    max_model_len: tokens of prompt and output together that the model knows.
    kv_tokens: tokens that all KV pages together hold.
    eos_token_ids: tokens that end an output unless ignore_eos is asked for.
    has_chat_template: whether messages can be rendered.
    max_adapters: the most adapters of a composition: slots.
    max_composition_rows: the most rank rows of all of them together.
    """

    vocab_size: int
    max_model_len: int
    kv_tokens: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    max_adapters: int = 0
    max_composition_rows: int = 0
    max_outputs: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_string_length: int = 256
    max_messages: int = 1024

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and output together that can be served at all."""
        return min(self.max_model_len, self.kv_tokens)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt that leaves room for one token of output."""
        return self.max_sequence_tokens - 1
