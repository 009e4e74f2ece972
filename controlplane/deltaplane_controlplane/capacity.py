"""How much fits: the arithmetic of GetCapacity."""

from collections.abc import Collection, Sequence

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.pins import max_pinned_slots
from deltaplane_controlplane.ports import MAX_VECTOR_ROWS, rank_pages
from deltaplane_controlplane.tiers import DeviceTier, HostTier
from deltaplane_controlplane.versions import Version
from deltaplane_controlplane.views import CapacityView, RankCapacity, TierCapacity

MAX_RANKS = 256
_USUAL_RANKS = (8, 16, 32, 64)


def capacity_view(
    host: HostTier,
    device: DeviceTier,
    pinned: Collection[Version],
    *,
    page_bytes: int,
    max_lora_rank: int,
    ranks: Sequence[int],
    registered: int,
) -> CapacityView:
    """What the tiers hold, and how many more adapters of each rank fit.

    pinned: what is pinned on the device, there or on its way.
    ranks: empty means the usual ones as far as they are allowed, and the highest. The answers are for
        adapters with nothing but LoRA in the layers. Those with DoRA have a row more, and so take what one
        more rank does, which may be over the highest; with biases they have yet another.
    In host memory an adapter is taken to need what it takes on the device.
    Errors: InvalidArgumentError (field "ranks").
    """
    free_slots, free_pages = device.num_free_slots, device.pages.num_free
    available_slots, available_pages = device.available
    free_host_bytes = host.max_bytes - host.used_bytes
    pinned_pages = sum(version.num_pages for version in pinned)
    unpinned_pages = max(device.pages.num_pages - pinned_pages, 0)
    free_pins = max(max_pinned_slots(device) - len(pinned), 0)

    def by_rank(rank: int) -> RankCapacity:
        pages = rank_pages(rank)
        return RankCapacity(
            rank=rank,
            pages=pages,
            fit_free=min(free_slots, free_pages // pages),
            fit_available=min(available_slots, available_pages // pages),
            fit_host=free_host_bytes // max(pages * page_bytes, 1),
            fit_pinned=min(free_pins, unpinned_pages // pages),
        )

    return CapacityView(
        device=TierCapacity(
            total_bytes=device.pages.num_pages * page_bytes,
            used_bytes=(device.pages.num_pages - free_pages) * page_bytes,
            held_bytes=(device.pages.num_pages - available_pages) * page_bytes,
        ),
        host=TierCapacity(host.max_bytes, host.used_bytes, host.held_bytes),
        slots=device.num_slots,
        free_slots=free_slots,
        available_slots=available_slots,
        rank_pages=device.pages.num_pages,
        free_rank_pages=free_pages,
        max_lora_rank=max_lora_rank,
        by_rank=tuple(by_rank(rank) for rank in _checked(ranks, max_lora_rank)),
        registered_adapters=registered,
        pinned_slots=len(pinned),
        max_pinned_slots=max_pinned_slots(device),
        pinned_rank_pages=pinned_pages,
    )


def _checked(ranks: Sequence[int], highest: int) -> Sequence[int]:
    if len(ranks) > MAX_RANKS:
        raise InvalidArgumentError.for_field(
            "ranks", f"{len(ranks)} are asked for, at most {MAX_RANKS} at once"
        )
    for index, rank in enumerate(ranks):
        if not 1 <= rank <= highest + MAX_VECTOR_ROWS:
            raise InvalidArgumentError.for_field(
                f"ranks[{index}]",
                f"{rank} is not between 1 and --max-lora-rank {highest}, with a row more for DoRA and "
                "another for biases",
            )
    return ranks or sorted({rank for rank in _USUAL_RANKS if rank <= highest} | {highest})
