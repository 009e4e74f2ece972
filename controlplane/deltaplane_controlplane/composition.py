"""Which adapters may be added up."""

from collections.abc import Sequence

from deltaplane_controlplane.errors import FailedPreconditionError
from deltaplane_controlplane.ports import RANK_PAGE_ROWS
from deltaplane_controlplane.tiers import DeviceTier
from deltaplane_controlplane.versions import Version

MAX_COMPOSITION_ROWS = 256
"""The most rank rows that the pages of a composition's members have in all: what the kernels take."""


def max_composition_rows(num_rank_pages: int) -> int:
    """The same on a device with this many rank pages."""
    return min(MAX_COMPOSITION_ROWS, num_rank_pages * RANK_PAGE_ROWS)


def check_composition(terms: Sequence[tuple[Version, float]], device: DeviceTier) -> None:
    """Refuses versions and weights that can never be computed here. Only LoRA in the layers is a sum of
    deltas: DoRA's gain is that of its own delta, and a trained bias or head takes the place of another.

    Errors: FailedPreconditionError, which names the adapters and what they have, or the numbers.
    """
    versions = [version for version, _ in terms]
    if len(terms) == 1 and terms[0][1] == 1:
        return  # the adapter as it is
    if featured := [version for version in versions if version.manifest.features]:
        which = "; ".join(f"{version} has {', '.join(version.manifest.features)}" for version in featured)
        raise FailedPreconditionError(
            "adapters: only those with nothing but LoRA in the layers can be weighted and added up, and "
            f"{which}: leave them out, or use one alone in `adapter`",
            reason="ADAPTER_NOT_COMPOSABLE",
            metadata={"adapter": featured[0].adapter.name},
        )
    if len(versions) > device.num_slots:
        raise _too_large(f"{len(versions)} are given, and {device.num_slots} fit the slots of the device")
    rows = {version: RANK_PAGE_ROWS * version.num_pages for version in versions}
    limit = max_composition_rows(device.pages.num_pages)
    if sum(rows.values()) > limit:
        sizes = ", ".join(f"{version} {count}" for version, count in rows.items())
        raise _too_large(
            f"together they take {sum(rows.values())} rank rows ({sizes}), and {limit} fit a step"
        )


def _too_large(problem: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"adapters: {problem}: leave some out", reason="COMPOSITION_TOO_LARGE")
