"""PageBudget: how many pages of the engine may still be given away.

Pages that were promised to running requests count as given away although nobody holds them yet. Whoever else wants pages
claims them here first. If need be, contexts that do not run are suspended, least recently used first, but only if that is
enough: a claim that fails has suspended nobody. Called on the step thread.

Quotas: what one tenant may have. A pinned holder (a context, a publication) is charged the pages that it holds or was
promised, shared ones too: two that share a page are charged it twice, so that no charge depends on what others do. Checks
may refuse, charges not.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import Request
from jaxctx.errors import ResourceExhausted

RETRY_S = 5.0  # after which contexts, snapshots or pins of the tenant may have ended
HIDDEN = "\0"  # begins the tenant of what the engine holds for a tenant and does not show: snapshots, publications


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
        """Pages that nobody holds and nobody was promised."""
        return self._block_manager.available - self.pages_reserved

    def can_claim(self, pages: int) -> bool:
        """Whether `pages` would be claimable if all contexts that do not run and are not pinned were suspended."""
        claimable = self.claimable()
        return claimable >= pages or claimable + self._cache.suspendable() >= pages

    def claim(self, pages: int) -> Claim:
        """Make `pages` claimable by suspending as few contexts as that takes; or change nothing and refuse."""
        if not self.can_claim(pages):
            return Claim(granted=False)
        suspended: list[Context] = []
        victims = self._cache.victims()
        while self.claimable() < pages:
            victim = next(victims, None)
            if victim is None:
                return Claim(False, suspended)
            self._cache.suspend(victim)
            self.suspensions += 1
            suspended.append(victim)
        return Claim(True, suspended)


class Quotas:
    """The limits of one engine, equal for all tenants. What is hidden counts as its tenant's."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._charges: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)  # pages of a tenant's pinned holders

    def check(self, **counts: int) -> None:
        """Raises ResourceExhausted (QUOTA) if a tenant may not have so many, each by the name of its limit."""
        for quota, count in counts.items():
            limit = getattr(self._config, quota)
            if limit is not None and count > limit:
                raise ResourceExhausted(
                    f"{quota} is {limit}, and this would make {count}", reason="QUOTA", retry_after_s=RETRY_S
                )

    def pinned(self, tenant: str) -> int:
        """Pages that are charged to a tenant."""
        return self._charges[tenant.removeprefix(HIDDEN)].total()

    def check_pin(self, tenant: str, holder: Hashable, pages: int) -> None:
        """Raises ResourceExhausted (PIN_BUDGET) if the holder may not have so many pinned pages."""
        more = pages - self._charges[tenant.removeprefix(HIDDEN)][holder]
        budget = self._config.pin_budget
        remaining = max(budget - self.pinned(tenant), 0)
        if more > remaining:
            message = f"{more} more pages would be pinned; of {budget} that a tenant may pin, {remaining} remain"
            later_s = RETRY_S if pages <= budget else None
            raise ResourceExhausted(message, reason="PIN_BUDGET", retry_after_s=later_s)

    def charge(self, tenant: str, holder: Hashable, pages: int) -> None:
        """The holder has so many pinned pages from now on."""
        charges = self._charges[tenant.removeprefix(HIDDEN)]
        charges[holder] = pages
        if not pages:
            del charges[holder]
