"""PageBudget: how many pages of the engine can still be promised or used.

Pages that were promised to running requests count as used, although no context holds them yet. Everything else that
needs pages claims them here first. If needed, idle contexts are suspended, least recently used first, but only if that
is enough: a claim that fails has suspended none. Called on the step thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.engine.core.request import Request


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim, and the contexts that were suspended for it."""

    granted: bool
    suspended: Sequence[Context] = ()


class PageBudget:
    """The pages of one engine, some of which are promised to its `running` requests."""

    def __init__(self, cache: ContextCache, block_manager: BlockManager, running: list[Request]) -> None:
        self._cache = cache
        self._block_manager = block_manager
        self._running = running
        self.suspensions = 0  # contexts suspended so far

    @property
    def pages_reserved(self) -> int:
        """Pages that running requests were promised and have not taken yet."""
        return sum(request.reserved_pages for request in self._running)

    def claimable(self) -> int:
        """Pages that no context holds and no request was promised."""
        return self._block_manager.available - self.pages_reserved

    def claim(self, pages: int) -> Claim:
        """Make `pages` claimable by suspending as few contexts as that takes; or change nothing and refuse."""
        missing = pages - self.claimable()
        if missing <= 0:
            return Claim(granted=True)
        victims = self._cache.victims_for(missing)
        if victims is None:
            return Claim(granted=False)
        for victim in victims:
            self._cache.suspend(victim)
        self.suspensions += len(victims)
        return Claim(True, victims)
