"""Quotas: what one tenant may hold at most, and the account of its pinned pages.

A pinned holder (a context, a publication) is charged the pages that it holds or was promised, shared ones too: two
that share a page are charged it twice, so that no charge depends on what others do. Checks refuse and change nothing;
charges never refuse. Called on the step thread.
"""

from __future__ import annotations

from collections.abc import Hashable

from jaxctx.engine.config import EngineConfig
from jaxctx.errors import ResourceExhausted

HIDDEN = "\0"  # begins the tenant of what the engine holds for a tenant and does not show: snapshots, publications


class Quotas:
    """Of one engine, equal for all tenants. What is hidden counts as its tenant's."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._charges: dict[str, dict[Hashable, int]] = {}  # pages of each pinned holder, by tenant
        self._pinned: dict[str, int] = {}  # their sums

    def check_contexts(self, count: int) -> None:
        """Raises ResourceExhausted (QUOTA) if a tenant may not have so many contexts."""
        _check("max_contexts_per_tenant", count, self._config.max_contexts_per_tenant)

    def check_snapshots(self, count: int, size_bytes: int) -> None:
        """Raises ResourceExhausted (QUOTA) if a tenant may not have so many versions of snapshots, or so large ones."""
        _check("max_snapshots_per_tenant", count, self._config.max_snapshots_per_tenant)
        _check("max_snapshot_bytes_per_tenant", size_bytes, self._config.max_snapshot_bytes_per_tenant)

    def pinned(self, tenant: str) -> int:
        """Pages that are charged to a tenant."""
        return self._pinned.get(tenant.removeprefix(HIDDEN), 0)

    def check_pin(self, tenant: str, holder: Hashable, pages: int) -> None:
        """Raises ResourceExhausted (PIN_BUDGET) if the holder may not have so many pinned pages."""
        more = pages - self._charges.get(tenant.removeprefix(HIDDEN), {}).get(holder, 0)
        budget = self._config.pin_budget
        remaining = max(budget - self.pinned(tenant), 0)
        if more > remaining:
            message = f"{more} more pages would be pinned; of {budget} that a tenant may pin, {remaining} remain"
            raise ResourceExhausted(message, reason="PIN_BUDGET")

    def charge(self, tenant: str, holder: Hashable, pages: int) -> None:
        """The holder has so many pinned pages from now on."""
        tenant = tenant.removeprefix(HIDDEN)
        charges = self._charges.setdefault(tenant, {})
        self._pinned[tenant] = self.pinned(tenant) + pages - charges.get(holder, 0)
        charges[holder] = pages

    def unpin(self, tenant: str, holder: Hashable) -> None:
        """The holder is pinned no more, if it was."""
        tenant = tenant.removeprefix(HIDDEN)
        charges = self._charges.get(tenant, {})
        if holder in charges:
            self._pinned[tenant] -= charges.pop(holder)
        if not charges:
            self._charges.pop(tenant, None)
            self._pinned.pop(tenant, None)


def _check(quota: str, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        raise ResourceExhausted(f"{quota} is {limit}, and this would make {count}", reason="QUOTA")
