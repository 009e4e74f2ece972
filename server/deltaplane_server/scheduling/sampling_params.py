"""How the next token of a sequence is drawn, and when the sequence ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one sequence, already checked against the model's limits (see dataplane.validation).

    Order of application: repetition, presence and frequency penalty, logit_bias, temperature, top_k,
    top_p, min_p.

    temperature: 0 is greedy.
    top_k: 0 is off.  top_p: 1 is off.  min_p: 0 is off.
    seed: None draws one at random.
    logprobs: None reports none; k >= 0 reports the drawn token's and the k likeliest ones'.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends.

    max_tokens: at least 1; prompt and output together fit the model's length.
    min_tokens: end-of-sequence and stops count only from this many output tokens on; until then
        end-of-sequence and stop tokens are not drawn.
    stop_token_ids: tokens that end the output, apart from eos_token_ids.
    eos_token_ids: empty where ignore_eos was asked for.
    """

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
