"""Whether a tenant's quotas have room for snapshots, asked before what they are to hold is computed.

No method of the contract asks that: over gRPC, a client learns it when it saves.
"""

from typing import Protocol

from jaxctx.engine.interface import Caller
from jaxctx_server.lifecycle import ServerLifecycle


class SnapshotRoom(Protocol):
    """Knows the room that tenants have for snapshots."""

    async def check(self, caller: Caller, versions: int) -> None:
        """Raise ResourceExhausted (QUOTA) if the caller's quotas have no room for so many more versions."""


class LocalSnapshotRoom:
    """That of the engine of this process."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    async def check(self, caller: Caller, versions: int) -> None:
        await self._lifecycle.model().engine.check_snapshot_room(caller, versions)


class UnknownSnapshotRoom:
    """That of a router, whose engines tell it when something is saved."""

    async def check(self, caller: Caller, versions: int) -> None:
        """Raises nothing."""
