"""Asking the step thread again for pages that are not available now.

An answer may take a look at all contexts. So all who wait together take a small share of the step thread, however many
they are: one of them asks at a time, and the longer its answer took, the later the next one does. Tenants take turns.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from jaxctx.tenant_turns import TenantTurns

P = ParamSpec("P")
T = TypeVar("T")

RETRY_S = 0.01  # after which the next one asks, at the earliest
SHARE = 0.05  # of the step thread's time, for all who ask again
LONGEST_PAUSE_S = 1.0  # between two of them, however long an answer took


class PageWaits:
    """Those who wait for pages of one engine. Used on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._turns = TenantTurns(joined=self._begin, unused=lambda _: self._end_turn(0.0))
        self._has_turn = False  # one that asks now, or is about to
        self._next_turn: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of these

    async def ask(
        self, tenant: str, question: Callable[[], Awaitable[tuple[T | None, float]]], give_up_at: float | None
    ) -> T | None:
        """Ask at once, and again until there is an answer, or the last one was given after `give_up_at`: None then.

        `question` returns the answer, None while there are no pages, and what it took on the step thread, in seconds.
        Raises what it raises.
        """
        answer, _ = await question()
        while answer is None and give_up_at is not None and (left_s := give_up_at - self._clock()) > 0:
            has_turn = await self._wait(tenant, left_s)
            took_s = 0.0
            try:
                answer, took_s = await question()
            finally:
                if has_turn:
                    self._end_turn(took_s)
        return answer

    async def _wait(self, tenant: str, longest_s: float) -> bool:
        """Wait for a turn. False: there was none in that time."""
        try:
            async with asyncio.timeout(longest_s):
                await self._turns.wait(tenant)
        except TimeoutError:
            return False
        return True

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # an engine may outlive one, with all who waited on it
            self._loop, self._next_turn, self._has_turn = loop, None, False
        if self._next_turn is None and not self._has_turn:
            self._give_turn_after(RETRY_S)

    def _end_turn(self, took_s: float) -> None:
        self._has_turn = False
        self._give_turn_after(min(max(took_s / SHARE, RETRY_S), LONGEST_PAUSE_S))

    def _give_turn_after(self, seconds: float) -> None:
        self._next_turn = asyncio.get_running_loop().call_later(seconds, self._give_turn)

    def _give_turn(self) -> None:
        self._next_turn = None
        self._has_turn = self._turns.give() is not None


def timed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What the function returns, and the seconds of this thread that it took."""
    begun = time.thread_time()
    result = function(*args, **kwargs)
    return result, time.thread_time() - begun
