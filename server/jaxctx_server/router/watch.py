"""WatchContexts of a router: the changes of the contexts on all engines, as one stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from jaxctx.engine.interface import Caller
from jaxctx.errors import JaxctxError
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.router.engines import RouterEngines, remote_engine, set_engine_id
from jaxctx_server.router.forwarding import draining_error
from jaxctx_server.router.placement import ContextKey, PlacementTable

BUFFERED_CHANGES = 64  # that wait for a slow reader
POLL_S = 1.0  # how often a watch looks for engines that came or went
RESTART_PAUSE_S = 0.1  # before it begins again


class Watcher:
    """Watches the contexts of all engines."""

    def __init__(self, lifecycle: ServerLifecycle, engines: RouterEngines, placements: PlacementTable) -> None:
        self._lifecycle = lifecycle
        self._engines = engines
        self._placements = placements

    async def watch(
        self, caller: Caller, request: pb.WatchContextsRequest
    ) -> AsyncGenerator[pb.WatchContextsResponse, None]:
        """The changes on all engines. When an engine comes, is lost or has lost changes, RESET follows and then all
        contexts as they are. Raises Unavailable (DRAINING) when the router drains.
        """
        programs = self._lifecycle.served().programs
        watching = replace(caller, deadline=None)
        while True:
            if programs.draining:  # before anything is asked of a server that may have stopped meanwhile
                raise draining_error()
            session = WatchSession(self._engines, self._placements, watching, request)
            try:
                while not programs.draining and session.is_complete():
                    change = await session.next_change()
                    if change is None:
                        continue
                    if change.change == pb.CONTEXT_CHANGE_RESET:
                        break
                    yield change
            finally:
                session.cancel()
            if programs.draining:
                raise draining_error()
            await asyncio.sleep(RESTART_PAUSE_S)
            reset = pb.WatchContextsResponse(change=pb.CONTEXT_CHANGE_RESET)
            reset.at.GetCurrentTime()
            yield reset


class WatchSession:
    """The watches of the engines that answer when it begins."""

    def __init__(
        self, engines: RouterEngines, placements: PlacementTable, caller: Caller, request: pb.WatchContextsRequest
    ) -> None:
        self._engines = engines
        self._placements = placements
        self._caller = caller
        self._request = request
        self._changes: asyncio.Queue[pb.WatchContextsResponse] = asyncio.Queue(BUFFERED_CHANGES)
        self._handles = set(engines.handles())
        self._readers = {handle: asyncio.create_task(self._read(handle)) for handle in self._handles}

    def is_complete(self) -> bool:
        """Whether it watches all engines that answer now. One that drains needs no watch."""
        ended = any(reader.done() and not handle.draining for handle, reader in self._readers.items())
        return not ended and self._handles == set(self._engines.handles())

    async def next_change(self) -> pb.WatchContextsResponse | None:
        """The next change on any engine; None if there is none for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                return await self._changes.get()
        return None

    def cancel(self) -> None:
        """End the watches."""
        for reader in self._readers.values():
            reader.cancel()

    async def _read(self, handle: EngineHandle) -> None:
        """Read the changes on one engine until it is lost or drains, which others notice."""
        engine = remote_engine(handle)
        with suppress(JaxctxError):
            async with engine.started(engine.contexts.WatchContexts, self._caller, self._request) as changes:
                async for change in changes:
                    set_engine_id([change.context], handle)
                    if not self._moves(change, handle):
                        await self._changes.put(change)

    def _moves(self, change: pb.WatchContextsResponse, handle: EngineHandle) -> bool:
        """Whether a change on an engine is but a step of the context's move between engines."""
        placement = self._placements.get(ContextKey(self._caller.tenant, change.context_id))
        if placement is None or placement.handle is handle:
            return False
        return self._engines.is_registered(placement.handle)
