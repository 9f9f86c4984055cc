"""Budget: which of the cache's pages may still be given away.

Pages promised to running sequences (`reserved`) are spoken for although nobody holds them yet. Whoever else wants pages
claims them here first; if need be, contexts that do not run are suspended, least recently used first, but only if that
is enough: a claim that fails has suspended nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxctx.cache.contexts import Context, ContextCache
from jaxctx.engine.sequence import Sequence


class PageBudget:
    """Of one engine, whose `running` sequences have pages reserved."""

    def __init__(self, cache: ContextCache, running: list[Sequence]) -> None:
        self._cache = cache
        self._running = running
        self.suspensions = 0
        self.on_suspend: Callable[[Context], None] = lambda context: None

    @property
    def reserved(self) -> int:
        """Pages that running sequences were promised and have not taken yet."""
        return sum(sequence.reserved for sequence in self._running)

    def claimable(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        return self._cache.available() - self.reserved

    def claim(self, pages: int) -> bool:
        """Make `pages` claimable; False, with nothing changed, if suspending everybody would not do it."""
        if self.claimable() >= pages:
            return True
        if self.claimable() + self._cache.suspendable() < pages:
            return False
        for victim in self._cache.victims():
            self._cache.suspend(victim)
            self.suspensions += 1
            self.on_suspend(victim)
            if self.claimable() >= pages:
                return True
        return False
