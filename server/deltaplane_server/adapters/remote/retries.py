"""Trying again what may succeed the next time: the one rule for all remote sources."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from deltaplane_controlplane.errors import UnavailableError

_LONGEST_WAIT_S = 30.0
COME_BACK_S = 30.0
"""When to ask again for what cannot be fetched now."""

RETRIED_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))
"""HTTP answers that do not mean the request is wrong."""

_T = TypeVar("_T")


class TryAgainError(Exception):
    """A try failed in a way that the next may not.

    why: for people, about the other side, such as "it answers 503".
    after_s: how long the other side asks to wait.
    advanced: whether the try has come further than all before it: they all do not count then.
    """

    def __init__(self, why: str, *, after_s: float = 0.0, advanced: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.after_s = after_s
        self.advanced = advanced


@dataclass(frozen=True, slots=True)
class Retries:
    """max_tries: in a row that come no further. backoff_s: the wait after the first, doubled with each."""

    max_tries: int = 5
    backoff_s: float = 0.5

    async def run(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """What the attempt answers. what: is to be reached, for people.

        Errors: UnavailableError after the last try; those of the attempt.
        """
        tries = 0
        while True:
            try:
                return await attempt()
            except TryAgainError as error:
                tries = 0 if error.advanced else tries + 1
                if tries >= self.max_tries:
                    raise UnavailableError(
                        f"{what} cannot be fetched now: {error.why}",
                        reason="SOURCE_UNAVAILABLE",
                        retry_after_s=max(error.after_s, COME_BACK_S),
                    ) from error
                await asyncio.sleep(self._wait(tries, error.after_s))

    def _wait(self, tries: int, asked: float) -> float:
        backoff = self.backoff_s * 2.0 ** max(tries - 1, 0) * random.uniform(0.5, 1.0)
        return min(max(backoff, asked), _LONGEST_WAIT_S)
