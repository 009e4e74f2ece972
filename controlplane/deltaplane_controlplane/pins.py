"""How much may be pinned."""

from collections.abc import Collection

from deltaplane_controlplane.errors import FailedPreconditionError
from deltaplane_controlplane.tiers import DeviceTier, HostTier
from deltaplane_controlplane.versions import Tier, Version


def max_pinned_slots(device: DeviceTier) -> int:
    """SGLang's rule: at most all slots but one, so that the others still have a place."""
    return max(device.num_slots - 1, 0)


def check_pin(
    version: Version, tier: Tier, pinned: Collection[Version], host: HostTier, device: DeviceTier
) -> None:
    """Refuses a pin that can never be met, and one of the last slot that others may have.

    pinned: what else is pinned there.
    Errors: FailedPreconditionError, with the numbers.
    """
    problem = (
        _host_problem(version, pinned, host)
        if tier is Tier.HOST
        else _device_problem(version, pinned, device)
    )
    if problem:
        raise FailedPreconditionError(
            f"adapter {version.adapter.name!r} cannot be pinned in tier {tier.name}: {problem}; "
            "unpin another",
            reason="TOO_MUCH_PINNED",
        )


def _host_problem(version: Version, pinned: Collection[Version], host: HostTier) -> str:
    needed, taken = version.manifest.host_bytes, sum(v.manifest.host_bytes for v in pinned)
    if taken + needed <= host.max_bytes:
        return ""
    return f"it takes {needed} bytes, and {taken} of {host.max_bytes} are pinned"


def _device_problem(version: Version, pinned: Collection[Version], device: DeviceTier) -> str:
    if len(pinned) >= max_pinned_slots(device):
        return f"{len(pinned)} of {device.num_slots} slots are pinned, and one must stay free for others"
    needed, taken = version.num_pages, sum(v.num_pages for v in pinned)
    if taken + needed <= device.pages.num_pages:
        return ""
    return f"it takes {needed} rank pages, and {taken} of {device.pages.num_pages} are pinned"
