"""Lets requests in: checks them, tokenises their prompts, takes their leases and hands them to the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.manager import AdapterManager
from deltaplane_server.dataplane import validation
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.dataplane.prompts import Prompts
from deltaplane_server.dataplane.violations import Violations
from deltaplane_server.engine.api import AdapterUse, GenerationRequest
from deltaplane_server.engine.async_engine import AsyncEngine, OutputStream


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that the engine has taken, and its stream; the engine owns the lease."""

    request: GenerationRequest
    stream: OutputStream


class Admission:
    """The way of a request from the wire to the engine."""

    def __init__(
        self,
        limits: RequestLimits,
        prompts: Prompts,
        manager: AdapterManager,
        engine: AsyncEngine,
        seed: int | None,
    ) -> None:
        """seed: of the seeds of requests that bring none; None leaves them random."""
        self._limits = limits
        self._prompts = prompts
        self._manager = manager
        self._engine = engine
        self._seeds = None if seed is None else Random(seed)

    async def admit(self, request: pb.GenerateRequest) -> Accepted:
        """Checks all of a request, then takes its lease and submits it, with nothing awaited in between.

        Errors: InvalidArgumentError (with all fields that are out of bounds), NotFoundError (no such adapter
        or version), FailedPreconditionError (an adapter failed to load, or cannot be added to others),
        AlreadyExistsError (the id is in flight), ResourceExhaustedError (the queue is full),
        UnavailableError (the server is draining).
        """
        checked, weights = await self._check(request)
        lease = self._lease(request, weights)
        if lease is None:
            return Accepted(checked, self._engine.generate(checked))
        leased = replace(checked, lease=lease, adapters=_uses(lease), tenant=checked.tenant or lease.adapter)
        try:
            return Accepted(leased, self._engine.generate(leased))
        except BaseException:
            lease.release()
            raise

    def _lease(self, request: pb.GenerateRequest, weights: Mapping[str, float]) -> Lease | None:
        """On the adapter that is to answer, or on all of a composition; None for the base model."""
        if weights:
            return self._manager.compose(weights)
        if not request.adapter:
            return None
        version = request.adapter_version if request.HasField("adapter_version") else None
        return self._manager.lease(request.adapter, version)

    async def _check(self, request: pb.GenerateRequest) -> tuple[GenerationRequest, Mapping[str, float]]:
        """What the engine is to do, without a lease; and the weights of a composition's adapters."""
        found = Violations()
        limits = self._limits
        validation.check_request_id(request.request_id, found)
        weights = validation.check_routing(request, limits, found)
        sampling = validation.check_sampling(
            request.sampling, request.output, limits, found, default_seed=self._next_seed()
        )
        num_outputs = validation.check_num_outputs(request.sampling, limits, found)
        stream_interval = validation.check_stream_interval(request.output, found)
        validation.check_truncation(request, found)
        prompt_tokens = await self._prompts.token_ids(request, found)
        stop = validation.check_stop(request.stop, len(prompt_tokens), limits, found)
        found.raise_if_any()
        options = request.output
        checked = GenerationRequest(
            request_id=request.request_id,
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            stop=stop,
            num_outputs=num_outputs,
            tenant=request.tenant,
            priority=request.priority,
            skip_special_tokens=options.skip_special_tokens
            if options.HasField("skip_special_tokens")
            else True,
            stream_interval=stream_interval,
        )
        return checked, weights

    def _next_seed(self) -> int | None:
        return None if self._seeds is None else self._seeds.getrandbits(64)


def _uses(lease: Lease) -> tuple[AdapterUse, ...]:
    return tuple(
        AdapterUse(member.version.adapter.name, member.version.number, member.weight, member.hit)
        for member in lease.members
    )
