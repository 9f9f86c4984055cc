"""Calls of the snapshot store, which may block, made from an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from jaxctx.store import SnapshotStore

T = TypeVar("T")
P = ParamSpec("P")

# Nothing else runs on these threads, and no call of the store on others. While its server or disk does not answer,
# calls hold their threads, whatever became of their callers. On the event loop's own threads they would stop all else
# that needs those: nobody would notice that a key was revoked.
_STORE_THREADS = ThreadPoolExecutor(16, thread_name_prefix="jaxctx-store")


async def on_store_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, on the threads of calls of the store."""
    run = partial(copy_context().run, call, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_STORE_THREADS, run)


async def complete_or_undo(make: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
    """The result of `make`, which runs to its end even if the caller is cancelled.

    Then `undo` is called with the result, on a thread of its own: no other code has it.
    """

    async def abandon() -> None:
        await asyncio.wait([making])
        if making.exception() is None:
            await on_store_thread(undo, making.result())

    making = asyncio.ensure_future(make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.shield(abandon())
        raise


async def refresh_name(store: SnapshotStore, tenant: str, name: str) -> None:
    """Let the store read the changes of a name by other processes. Only a durable store can have any."""
    if store.durable:
        await on_store_thread(store.refresh_name, tenant, name)


class TenantRefresher:
    """Lets the store read what other processes made of all a tenant's names, unless it did so a moment ago.

    That may take seconds. Of each tenant there is one such look at a time, for all who ask on this event loop. Only a
    durable store can have changes by others.
    """

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._looks: dict[str, asyncio.Future[None]] = {}  # under way, by tenant

    async def refresh(self, tenant: str) -> None:
        """Wait for a look, if one is under way for that."""
        if self._store.durable:
            await asyncio.shield(self._look(tenant))  # others may wait for it too

    def begin(self, tenant: str) -> None:
        """Begin a look, and do not wait for it."""
        if self._store.durable:
            self._look(tenant)

    def _look(self, tenant: str) -> asyncio.Future[None]:
        under_way = self._looks.get(tenant)
        if under_way is None:
            loop = asyncio.get_running_loop()
            under_way = self._looks[tenant] = loop.run_in_executor(_STORE_THREADS, self._store.refresh_tenant, tenant)
            under_way.add_done_callback(lambda _: self._looks.pop(tenant))
        return under_way
