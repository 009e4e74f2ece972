"""How CPython shares itself between the engine's thread and the event loop.

Both run Python for a part of every step, and only one at a time holds the GIL.
"""

import gc
import sys

SWITCH_INTERVAL_S = 0.0001
"""How long a thread that wants the GIL lets another one keep it. Whenever the engine's thread has waited for
the device or called its driver it may have to win the GIL back from an event loop that is busy sending; at
CPython's 5 ms that takes as long as a step."""

_YOUNG_OBJECTS = 50_000
"""New objects that start a collection. Those of a step are far fewer and soon die without one: at CPython's
700 to 2000 the collector would go through them several times a step."""


def share_fairly() -> None:
    """Lets threads take turns at the GIL that are short beside a step. For the whole process."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def freeze_heap() -> None:
    """Takes what is there out of garbage collection, and has it run less often.

    A full collection stops all threads while it goes through every object: with a model's libraries loaded
    that is some hundred milliseconds. Call once everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
