"""Copies of contexts that moves left behind: each is closed, again and again until its engine says that it is gone.

A move makes a context on one engine and closes it on another. If that close fails, two engines have a context of this
id, and one of them holds what the context was before. The router knows which one is the context, but as soon as that
engine is lost, or the router starts anew, it would find the other one, and calls would go on with what that holds.
"""

import asyncio
from collections.abc import Callable, Set

from jaxctx.engine.interface import Caller
from jaxctx.errors import InvalidArgument, JaxctxError, NotFound, PermissionDenied
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx_server.router.engines import RouterEngines, remote_engine
from jaxctx_server.router.placement import ContextKey, CreatedKey, PlacementTable

CLOSE_TIMEOUT_S = 10.0  # for an engine to close a context
# Pauses before each further attempt, in seconds; together an hour. An engine that does not answer for so long is gone.
CLOSE_AGAIN_S = (0.0, 1.0, 2.0, 5.0, 15.0, *(30.0,) * 120)
# What an engine says that has no such context, or will never close it. After any other error nobody knows.
FINAL = (NotFound, InvalidArgument, PermissionDenied)


class LeftoverContexts:
    """The copies of contexts that are still to be closed. Used on the event loop."""

    def __init__(self, engines: RouterEngines, placements: PlacementTable, clock: Callable[[], float]) -> None:
        """`clock` is that of deadlines."""
        self._engines = engines
        self._placements = placements
        self._clock = clock
        self._closing: dict[ContextKey, dict[str, asyncio.Task[None]]] = {}  # by context, then by id of the engine

    async def close(self, key: ContextKey, handle: EngineHandle) -> None:
        """Close the copy of a context on an engine. If that fails it is tried again, and nobody waits for that."""
        is_closed = False
        try:
            is_closed = await self._try_to_close(key, handle)
        finally:  # also if this is cancelled
            if not is_closed:
                self.close_later(key, handle)

    def close_later(self, key: ContextKey, handle: EngineHandle) -> None:
        """Close the copy of a context on an engine, which may not have it, soon. Nobody waits for that."""
        closing = self._closing.setdefault(key, {})
        if handle.id not in closing:
            closing[handle.id] = asyncio.create_task(self._close_until_gone(key, handle.id))

    def engine_ids(self, key: ContextKey) -> Set[str]:
        """The ids of the engines that may have a copy of the context that is still to be closed."""
        return self._closing.get(key, {}).keys()

    async def _close_until_gone(self, key: ContextKey, engine_id: str) -> None:
        """Close a copy once its engine, or the same process registered anew, answers. In the end this gives up."""
        # While this lock is held no call makes a context of this id, which would be closed instead.
        lock = self._placements.creation_lock(CreatedKey(key.tenant, "GetContext", key.context_id))
        try:
            for pause_s in CLOSE_AGAIN_S:
                await asyncio.sleep(pause_s)
                async with lock:
                    placement = self._placements.get(key)
                    if placement is not None and placement.handle.id == engine_id:
                        return  # it is the context itself by now
                    handle = self._handle(engine_id)
                    if handle is not None and await self._try_to_close(key, handle):
                        return
        finally:
            closing = self._closing[key]
            del closing[engine_id]
            if not closing:
                del self._closing[key]

    def _handle(self, engine_id: str) -> EngineHandle | None:
        """The engine of this id, if it answers now."""
        return next((handle for handle in self._engines.handles() if handle.id == engine_id), None)

    async def _try_to_close(self, key: ContextKey, handle: EngineHandle) -> bool:
        """Close a context on an engine, or find it gone. False if the engine does not say so, and may later."""
        caller = Caller(key.tenant, self._clock() + CLOSE_TIMEOUT_S)
        try:
            await remote_engine(handle).close(caller, key.context_id)
        except FINAL:
            return True
        except JaxctxError:
            return False
        return True
