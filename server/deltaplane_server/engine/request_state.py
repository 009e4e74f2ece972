"""A request in flight: its outputs, its leases and its figures."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from deltaplane_server.engine.api import GenerationRequest, TokenDecoder, Usage
from deltaplane_server.engine.output import Output
from deltaplane_server.scheduling.lease import AdapterLease, members
from deltaplane_server.scheduling.sampling_params import SamplingParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence


class RequestState:
    """accepted, first_token: seconds on the engine's clock; first_token is None before it.

    is_waiting: whether it counts as waiting: none of its outputs has started or ended yet.
    """

    def __init__(
        self,
        request: GenerationRequest,
        leases: Sequence[AdapterLease | None],
        decoder: TokenDecoder,
        *,
        ids: Iterator[int],
        accepted: float,
    ) -> None:
        """leases: one for each output. ids: of its sequences."""
        self.request = request
        self.accepted = accepted
        self.first_token: float | None = None
        self.is_waiting = True
        self.outputs = [
            Output(request, self._sequence(index, lease, next(ids)), decoder)
            for index, lease in enumerate(leases)
        ]

    @property
    def adapter_uids(self) -> tuple[int, ...]:
        """The adapter versions that answer; none for the base model."""
        return members(self.outputs[0].sequence.adapter_uid)

    @property
    def started(self) -> float | None:
        """When it first was in a step."""
        return min((o.sequence.started for o in self.outputs if o.sequence.started is not None), default=None)

    def usage(self, now: float) -> Usage:
        """Figures as of `now`; what it never came to counts up to then."""
        sequences = [output.sequence for output in self.outputs]
        started = now if self.started is None else self.started
        first_token = now if self.first_token is None else self.first_token
        last_tokens = [o.last_token_time for o in self.outputs if o.last_token_time is not None]
        return Usage(
            prompt_tokens=sequences[0].num_prompt,
            completion_tokens=sum(sequence.num_output for sequence in sequences),
            cached_tokens=sequences[0].num_cached,
            queue_ms=(started - self.accepted) * 1000,
            prefill_ms=(first_token - started) * 1000,
            decode_ms=(max(last_tokens, default=now) - first_token) * 1000,
            adapters=self.request.adapters,
            adapter_load_ms=max(sequence.adapter_wait for sequence in sequences) * 1000,
            preemptions=sum(sequence.num_preemptions for sequence in sequences),
        )

    def _sequence(self, index: int, lease: AdapterLease | None, sequence_id: int) -> TokenSequence:
        request = self.request
        return TokenSequence(
            id=sequence_id,
            request_id=request.request_id,
            index=index,
            tokens=list(request.prompt_tokens),
            num_prompt=len(request.prompt_tokens),
            sampling=_with_seed_of(request.sampling, index),
            stop=request.stop,
            lease=lease,
            tenant=request.tenant,
            priority=request.priority,
            arrival=self.accepted,
        )


def _with_seed_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """How output `index` draws: with the request's seed + index, in 64 bits, or with a random seed."""
    seed = secrets.randbits(64) if sampling.seed is None else (sampling.seed + index) % 2**64
    return replace(sampling, seed=seed)
