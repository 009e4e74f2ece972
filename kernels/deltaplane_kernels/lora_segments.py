"""Whose rows a step has: adapters and blends of adapters, by the slots that they are in."""

import math
from collections import defaultdict
from collections.abc import Sequence

BASE_SLOT = -1
"""The slot of base-model rows."""

Blend = tuple[tuple[int, float], ...]
"""Plain adapters whose deltas are added up: (slot, weight) of each. At least one; no slot comes twice."""

MAX_BLEND_ROWS = 256
"""Most rows that the pages of a blend's members have in all."""

Slots = int | Blend
"""Whose a segment of rows is: an adapter's slot, or a blend's slots."""

Segments = Sequence[tuple[Slots, int]]
"""(slots, number of tokens) of each sequence in the order of the rows."""

Runs = dict[Slots, list[tuple[int, int]]]
"""Rows [start, stop) of each adapter and blend of a step, ascending; neighbours are joined."""


def runs_by_slots(segments: Segments) -> tuple[Runs, int]:
    """The runs of a step, which leave out the base model's rows; and the number of all rows.

    Errors: ValueError where a segment has no tokens.
    """
    runs: Runs = defaultdict(list)
    start = 0
    for slots, num_tokens in segments:
        if num_tokens < 1:
            raise ValueError(f"a segment of slot {slots} has {num_tokens} tokens; at least 1 is needed")
        stop = start + num_tokens
        if slots != BASE_SLOT:
            own = runs[slots]
            if own and own[-1][1] == start:
                own[-1] = (own[-1][0], stop)
            else:
                own.append((start, stop))
        start = stop
    return runs, start


def check_blend(blend: Blend) -> None:
    """Errors: ValueError where a blend has no members, a slot twice, or a weight that is not finite."""
    slots = [slot for slot, _ in blend]
    if not slots or len(set(slots)) != len(slots):
        raise ValueError(f"a blend of slots {slots}; it needs one at least, and each once")
    if not all(math.isfinite(weight) for _, weight in blend):
        raise ValueError(f"a blend's weights are finite, not {[weight for _, weight in blend]}")
