"""WatchContexts of a router: the changes of the contexts on all engines, as one stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from jaxctx.engine.interface import Caller
from jaxctx.errors import Cancelled, Internal, JaxctxError, ResourceExhausted, Unavailable
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.programs.sessions import Programs
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.router.engines import RouterEngines, remote_engine, set_engine_id
from jaxctx_server.router.forwarding import draining_error
from jaxctx_server.router.placement import ContextKey, PlacementTable

BUFFERED_CHANGES = 64  # that wait for a slow reader
POLL_S = 1.0  # how often a watch looks for engines that came or went
RESTART_PAUSE_S = 0.1  # before it begins again; twice as long each time that an engine ends it again
MAX_PAUSE_S = 5.0
# Codes of errors after which an engine may be watched again. Others say that it never will be.
TRANSIENT = frozenset((Unavailable.code, ResourceExhausted.code, Cancelled.code, Internal.code, "UNKNOWN"))


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
        contexts as they are; an engine that cannot be watched now is tried again, more and more seldom. Raises
        Unavailable (DRAINING) when the router drains, and an engine's error that says that waiting does not help.
        """
        programs = self._lifecycle.served().programs
        watching = replace(caller, deadline=None)
        now = asyncio.get_running_loop().time
        pause_s = RESTART_PAUSE_S
        while True:
            if programs.draining:  # before anything is asked of a server that may have stopped meanwhile
                raise draining_error()
            session = WatchSession(self._engines, self._placements, watching, request)
            begun_at = now()
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
            refusal = session.refusal()
            if refusal is not None and refusal.code not in TRANSIENT and refusal.retry_after_s is None:
                raise refusal
            if not session.ended() or now() - begun_at > MAX_PAUSE_S:
                pause_s = RESTART_PAUSE_S
            wanted_s = 0.0 if refusal is None else refusal.retry_after_s or 0.0
            await pause(min(max(pause_s, wanted_s), MAX_PAUSE_S), programs)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            reset = pb.WatchContextsResponse(change=pb.CONTEXT_CHANGE_RESET)
            reset.at.GetCurrentTime()
            yield reset


async def pause(seconds: float, programs: Programs) -> None:
    """Wait; not longer than it takes to see that the programs drain."""
    end = asyncio.get_running_loop().time() + seconds
    while not programs.draining and (left_s := end - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(min(left_s, POLL_S))


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
        return not self.ended() and self._handles == set(self._engines.handles())

    def ended(self) -> list[EngineHandle]:
        """The engines whose watch has ended though they do not drain."""
        return [handle for handle, reader in self._readers.items() if reader.done() and not handle.draining]

    def refusal(self) -> JaxctxError | None:
        """The error with which an engine that answers has ended its watch; None: there is none."""
        for handle in self.ended():
            reader = self._readers[handle]
            error = None if reader.cancelled() else reader.result()
            if error is not None and error.reason not in ("ENGINE_LOST", "DRAINING"):
                return error
        return None

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

    async def _read(self, handle: EngineHandle) -> JaxctxError | None:
        """Read the changes on one engine until it ends the watch. Returns the error with which it does, if any."""
        engine = remote_engine(handle)
        try:
            async with engine.started(engine.contexts.WatchContexts, self._caller, self._request) as changes:
                async for change in changes:
                    set_engine_id([change.context], handle)
                    if not self._moves(change, handle):
                        await self._changes.put(change)
        except JaxctxError as error:
            return error
        return None

    def _moves(self, change: pb.WatchContextsResponse, handle: EngineHandle) -> bool:
        """Whether a change on an engine is but a step of the context's move between engines."""
        placement = self._placements.get(ContextKey(self._caller.tenant, change.context_id))
        if placement is None or placement.handle is handle:
            return False
        return self._engines.is_registered(placement.handle)
