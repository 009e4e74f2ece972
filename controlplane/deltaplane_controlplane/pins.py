"""How much may be pinned."""

from collections.abc import Iterable, Sequence

from deltaplane_controlplane.errors import FailedPreconditionError
from deltaplane_controlplane.tiers import DeviceTier, HostTier
from deltaplane_controlplane.versions import Adapter, Tier, Version


def check_pin(
    adapter: Adapter, tier: Tier, adapters: Iterable[Adapter], host: HostTier, device: DeviceTier
) -> None:
    """Refuses a pin that can never be met, and one of the last slot that others may have (SGLang's rule: at
    most all slots but one).

    Errors: FailedPreconditionError, with the numbers.
    """
    pinned = [a.current for a in adapters if a.pinned_tier is tier and a is not adapter]
    if tier is Tier.HOST:
        problem = _host_problem(adapter.current, pinned, host)
    else:
        problem = _device_problem(adapter.current, pinned, device)
    if problem:
        raise FailedPreconditionError(
            f"adapter {adapter.name!r} cannot be pinned in tier {tier.name}: {problem}; unpin another",
            reason="TOO_MUCH_PINNED",
        )


def _host_problem(version: Version, pinned: Sequence[Version], host: HostTier) -> str:
    needed, taken = version.manifest.host_bytes, sum(v.manifest.host_bytes for v in pinned)
    if taken + needed <= host.max_bytes:
        return ""
    return f"it takes {needed} bytes, and {taken} of {host.max_bytes} are pinned"


def _device_problem(version: Version, pinned: Sequence[Version], device: DeviceTier) -> str:
    if len(pinned) + 1 >= device.num_slots:
        return f"{len(pinned)} of {device.num_slots} slots are pinned, and one must stay free for others"
    needed, taken = version.num_pages, sum(v.num_pages for v in pinned)
    if taken + needed <= device.pages.num_pages:
        return ""
    return f"it takes {needed} rank pages, and {taken} of {device.pages.num_pages} are pinned"
