"""Calls of the snapshot store, which may block, made from an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from jaxctx.store import SnapshotStore

T = TypeVar("T")


async def complete_or_undo(make: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
    """The result of `make`, which runs to its end even if the caller is cancelled.

    Then `undo` is called with the result, on a thread of its own: no other code has it.
    """

    async def abandon() -> None:
        await asyncio.wait([making])
        if making.exception() is None:
            await asyncio.to_thread(undo, making.result())

    making = asyncio.ensure_future(make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.shield(abandon())
        raise


async def refresh_name(store: SnapshotStore, tenant: str, name: str) -> None:
    """Let the store read the changes of a name by other processes. Only a durable store can have any."""
    if store.durable:
        await asyncio.to_thread(store.refresh_name, tenant, name)


def refresh_tenant_soon(store: SnapshotStore, tenant: str) -> None:
    """Begin what `refresh_tenant` does, on a thread, and do not wait for it."""
    if store.durable:
        asyncio.get_running_loop().run_in_executor(None, store.refresh_tenant, tenant)


async def refresh_tenant(store: SnapshotStore, tenant: str) -> None:
    """Let the store read the changes of all a tenant's names by other processes, unless it did so a moment ago."""
    if store.durable:
        await asyncio.to_thread(store.refresh_tenant, tenant)
