"""The page budget: what may still be given away of an engine's pages. Called on the step thread.

Pages promised to running sequences are spoken for although nobody holds them yet. Whoever else wants pages claims them
here first; if need be, contexts that do not run are suspended, least recently used first, but only if that is enough: a
claim that fails has suspended nobody.
"""

from collections.abc import Callable

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.engine.core.request import Request


class PageBudget:
    """The pages of one engine, of which its `running` sequences were promised some."""

    def __init__(self, cache: ContextCache, running: list[Request]) -> None:
        self._cache = cache
        self._running = running
        self.suspensions = 0
        self.on_suspend: Callable[[Context], None] = lambda context: None

    @property
    def pages_reserved(self) -> int:
        """Pages that running sequences were promised and have not taken yet."""
        return sum(sequence.reserved for sequence in self._running)

    def claimable(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        return self._cache.block_manager.available - self.pages_reserved

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
