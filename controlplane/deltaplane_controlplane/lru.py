"""Who goes first when room is needed: the least recently used."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class LruOrder(Generic[T]):
    """Things in order of their last use, the least recent first."""

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def touch(self, item: T) -> None:
        """Makes an item the most recently used one; it need not be known yet."""
        self._order[item] = None
        self._order.move_to_end(item)

    def remove(self, item: T) -> None:
        del self._order[item]

    def __contains__(self, item: T) -> bool:
        return item in self._order

    def __iter__(self) -> Iterator[T]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def choose_victims(
    candidates: Iterable[T], shortage: Sequence[int], gain: Callable[[T], Sequence[int]]
) -> list[T] | None:
    """The least recently used whose going covers a shortage, none in vain; None where all do not suffice.

    candidates: least recently used first.
    shortage: what is missing of each resource; zero or less is no shortage.
    gain: what a candidate's going gives of each.

    Takes candidates in order until all is covered, then spares those that turn out not to be needed, the
    most recently used first.
    """
    missing = list(shortage)
    victims: list[T] = []
    waiting = iter(candidates)
    while any(m > 0 for m in missing):
        victim = next(waiting, None)
        if victim is None:
            return None
        victims.append(victim)
        missing = [m - g for m, g in zip(missing, gain(victim), strict=True)]
    for victim in reversed(victims.copy()):
        without = [m + g for m, g in zip(missing, gain(victim), strict=True)]
        if all(m <= 0 for m in without):
            victims.remove(victim)
            missing = without
    return victims
