"""One output of one request, as the scheduler sees it. No tensor, no text."""

from dataclasses import dataclass, field
from enum import Enum, auto

from deltaplane_server.scheduling.lease import AdapterLease, AdapterUid, Slots
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of a prompt and of its output, and how far their KV is computed.

    id: unique in this process.
    request_id, index: the request and which of its outputs this is.
    tokens: prompt and output together, as far as the host knows them; grows as steps are read.
    num_pending: tokens drawn by steps under way, which `tokens` lacks: the device knows them alone.
    num_steps: steps under way that compute tokens of this sequence.
    num_computed: tokens whose KV is in `pages`, or will be after the steps under way; 0 after a preemption.
    pages: KV page ids, in order; page i holds tokens [i * page_size, (i + 1) * page_size).
    lease: the adapter version that answers, or several; None for the base model.
    adapter_uid: identity of what answers.
    slot: where that is while running; -1 for the base model.
    page_digests: prefix-cache digests of the full pages at its start, as far as they were asked for.
    arrival, started: seconds on the scheduler's clock when it was accepted, and when it first was in a step.
    blocked_since: when it was first passed over for want of KV pages; None where it was not.
    adapter_wait: seconds it has waited for its adapter to become resident.
    num_cached: prompt tokens whose KV came from the prefix cache when it first started.
    """

    id: int
    request_id: str
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    stop: StopParams
    lease: AdapterLease | None = None
    tenant: str = ""
    priority: int = 0
    arrival: float = 0.0

    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_pending: int = 0
    num_steps: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list)
    slot: Slots = -1
    started: float | None = None
    blocked_since: float | None = None
    adapter_wait: float = 0.0
    adapter_uid: AdapterUid = field(init=False)

    def __post_init__(self) -> None:
        self.adapter_uid = self.lease.uid if self.lease is not None else 0

    @property
    def num_tokens(self) -> int:
        """Tokens that there are, pending ones included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output(self) -> int:
        """Output tokens that the host knows."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_drawn(self) -> int:
        """Output tokens that there are, pending ones included."""
        return self.num_tokens - self.num_prompt

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]
