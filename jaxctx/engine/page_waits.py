"""Asking the step thread again for pages that are not available now.

An answer may take a look at all contexts. So all who wait together take a small share of the step thread, however many
they are: the longer an answer takes, the later the next one of them asks.
"""

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

RETRY_S = 0.01  # after which one that waits alone asks again, at the earliest
SHARE = 0.05  # of the step thread's time, for all who ask again


class PageWaits:
    """Those who wait for pages of one engine. Each asks, and calls `again` if it was refused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: unix seconds."""
        self._clock = clock
        self._next_at = 0.0  # from when on the next of them may ask

    async def again(self, took_s: float, give_up_at: float) -> bool:
        """Wait until it is time to ask again; False: it would be after `give_up_at`, until which this has waited.

        `took_s`: what the last answer took on the step thread.
        """
        now = self._clock()
        at = max(now + RETRY_S, self._next_at)
        is_in_time = at <= give_up_at
        if is_in_time:
            self._next_at = at + took_s / SHARE
        await asyncio.sleep(max(min(at, give_up_at) - now, 0))
        return is_in_time


def timed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What the function returns, and the seconds that it took."""
    begun = time.perf_counter()
    result = function(*args, **kwargs)
    return result, time.perf_counter() - begun
