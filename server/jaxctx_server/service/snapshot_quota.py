"""Whether a tenant's quotas allow more snapshots, asked before what they are to hold is computed.

No method of the contract asks that: over gRPC, a client learns it when it saves.
"""

from typing import Protocol

from jaxctx.engine.interface import Caller
from jaxctx_server.lifecycle import ServerLifecycle


class SnapshotQuota(Protocol):
    """Knows the quotas that tenants have for snapshots."""

    async def check(self, caller: Caller, versions: int) -> None:
        """Raise ResourceExhausted (QUOTA) if the caller's quotas allow no such number of versions more."""


class LocalSnapshotQuota:
    """That of the engine of this process."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    async def check(self, caller: Caller, versions: int) -> None:
        await self._lifecycle.model().engine.check_snapshot_quota(caller, versions)


class UnknownSnapshotQuota:
    """That of a router, whose engines tell it when something is saved."""

    async def check(self, caller: Caller, versions: int) -> None:
        """Raises nothing."""
