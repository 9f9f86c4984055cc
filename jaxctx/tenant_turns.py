"""`TenantTurns`: those who wait for something scarce, each for a tenant, and whose turn is next."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

Turn: TypeAlias = asyncio.Future[None]
"""Of one who waits; it is done when the turn has come."""


class TenantTurns:
    """Those who wait. Tenants take turns, and whoever waits for a tenant goes in the order of coming.

    Used on the event loop.
    """

    def __init__(self, joined: Callable[[], None], unused: Callable[[str], None]) -> None:
        """`joined` is called when there is one more who waits, and may give turns.

        `unused` is called with the tenant of one whose turn had come, and who was cancelled before using it.
        """
        self._joined, self._unused = joined, unused
        self._waiting: OrderedDict[str, OrderedDict[Turn, None]] = OrderedDict()  # the next tenant first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def wait(self, tenant: str) -> None:
        """Wait behind the others of the tenant until the turn has come. Who is cancelled waits no more."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, OrderedDict())[turn] = None
        self._joined()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # it came just before
                self._unused(tenant)
            raise

    def give(self, is_allowed: Callable[[str], bool] = lambda _: True) -> str | None:
        """Let the next one have the turn, of a tenant that is allowed to; returns the tenant, None if there is none."""
        while (tenant := next(filter(is_allowed, self._waiting), None)) is not None:
            turn = next(iter(self._waiting[tenant]))
            is_waiting = not turn.done()  # or else it was cancelled, and its coroutine did not run since
            if is_waiting:
                self._waiting.move_to_end(tenant)
                turn.set_result(None)
            self._forget(tenant, turn)
            if is_waiting:
                return tenant
        return None

    def _forget(self, tenant: str, turn: Turn) -> None:
        waiting = self._waiting.get(tenant)
        if waiting is not None:
            waiting.pop(turn, None)
            if not waiting:
                del self._waiting[tenant]
