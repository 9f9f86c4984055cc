"""Quotas: what one tenant may have of an engine, and what its pinned contexts are charged.

A pinned holder (a context, a publication) is charged the pages that it holds or was promised, shared ones too: two
that share a page are charged it twice, so that no charge depends on what others do. Checks may refuse, charges not.
Only `check_snapshots` may be called from other threads than the step thread.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable

from jaxctx.engine.config import EngineConfig
from jaxctx.errors import ResourceExhausted

RETRY_S = 5.0  # after which contexts or pins of the tenant may have ended
HIDDEN = "\0"  # begins the tenant of what the engine holds for a tenant and does not show: snapshots, publications


def hidden_tenant(tenant: str) -> str:
    """The tenant under which the cache files what the engine holds for `tenant` and does not show."""
    return HIDDEN + tenant


def is_hidden(tenant: str) -> bool:
    """Whether this is the tenant of contexts that are not shown."""
    return tenant.startswith(HIDDEN)


def owner_of(tenant: str) -> str:
    """The tenant who pays for contexts of `tenant`, which may be a hidden one."""
    return tenant.removeprefix(HIDDEN)


class Quotas:
    """The limits of one engine, equal for all tenants. What is hidden counts as its owner's."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        # Pages that each pinned holder is charged, by tenant.
        self._charges: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)

    def check_contexts(self, count: int) -> None:
        """Raises ResourceExhausted (QUOTA) if a tenant may not have so many contexts."""
        _check("max_contexts_per_tenant", self._config.max_contexts_per_tenant, count, RETRY_S)

    @property
    def limits_snapshots(self) -> bool:
        """Whether `check_snapshots` may refuse anything."""
        return self.is_near_snapshot_limit(math.inf, math.inf)

    def is_near_snapshot_limit(self, count: float, size_bytes: float) -> bool:
        """Whether so many versions, or bytes of their pages, are half of what a tenant may have, or more."""
        limits = self._config.max_snapshots_per_tenant, self._config.max_snapshot_bytes_per_tenant
        return any(
            limit is not None and used >= limit / 2 for limit, used in zip(limits, (count, size_bytes), strict=True)
        )

    def check_snapshots(self, count: int, size_bytes: int) -> None:
        """Raises ResourceExhausted (QUOTA) if a tenant may not have so many versions, or bytes of their pages.

        Without a time after which to try again: snapshots are kept for days, or until the tenant deletes some.
        """
        _check("max_snapshots_per_tenant", self._config.max_snapshots_per_tenant, count, None)
        _check("max_snapshot_bytes_per_tenant", self._config.max_snapshot_bytes_per_tenant, size_bytes, None)

    def pinned(self, tenant: str) -> int:
        """Pages that are charged to a tenant."""
        return self._charges[owner_of(tenant)].total()

    def check_pin(self, tenant: str, holder: Hashable, pages: int) -> None:
        """Raises ResourceExhausted (PIN_BUDGET) if the holder may not have so many pinned pages."""
        more = pages - self._charges[owner_of(tenant)][holder]
        budget = self._config.pin_budget
        remaining = max(budget - self.pinned(tenant), 0)
        if more > remaining:
            message = f"{more} more pages would be pinned; of {budget} that a tenant may pin, {remaining} remain"
            later_s = RETRY_S if pages <= budget else None
            raise ResourceExhausted(message, reason="PIN_BUDGET", retry_after_s=later_s)

    def charge(self, tenant: str, holder: Hashable, pages: int) -> None:
        """The holder has so many pinned pages from now on."""
        charges = self._charges[owner_of(tenant)]
        charges[holder] = pages
        if not pages:
            del charges[holder]


def _check(quota: str, limit: int | None, count: int, retry_after_s: float | None) -> None:
    if limit is not None and count > limit:
        message = f"{quota} is {limit}, and this would make {count}"
        raise ResourceExhausted(message, reason="QUOTA", retry_after_s=retry_after_s)
