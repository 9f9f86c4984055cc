"""Contexts go on at other engines, by way of a durable store that both have.

Those of an engine that leaves do, and one that switches to an adapter that its engine lacks.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress

from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx.convert import duration_to_proto
from jaxctx.engine.interface import Caller, is_of_program
from jaxctx.engine.remote import RemoteEngine
from jaxctx.errors import JaxctxError
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.v1 import context_service_pb2, snapshot_service_pb2
from jaxctx.v1.context_pb2 import CONTEXT_STATE_BUSY, Context
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx_server.router.engines import RouterEngines, remote_engine
from jaxctx_server.router.placement import ContextKey, Placement, PlacementTable

MIGRATION_TIMEOUT_S = 60.0  # for a context of an engine that leaves to be on another one
MAX_MIGRATIONS = 8  # contexts that are on their way at once
MAX_LISTED = 1000  # entries that an engine returns at once at most
POLL_S = 0.1  # between looks for contexts that have become idle


class Migrator:
    """Moves contexts between engines. Used on the event loop."""

    def __init__(self, engines: RouterEngines, placements: PlacementTable, clock: Callable[[], float]) -> None:
        """`clock` is that of deadlines."""
        self._engines = engines
        self._placements = placements
        self._clock = clock

    async def evacuate(self, handle: EngineHandle) -> None:
        """Begin nothing more on an engine, and have its contexts go on elsewhere, each once no call is at work on it.

        Returns when all are elsewhere that can be, and no call is forwarded to the engine any more.
        """
        handle.draining = True
        done = set(self._placements.on_engine(handle))  # which the engine may have no more, as they ended by themselves
        done -= await self._find_contexts(handle)
        while True:
            placements = self._placements.on_engine(handle)
            left = [key for key in placements if key not in done]
            if not left and not handle.forwarded:
                return
            moves: dict[ContextKey, asyncio.Task[bool]] = {}
            for key in self._placements.idle(left)[:MAX_MIGRATIONS]:
                moves[key] = asyncio.create_task(self.migrate(placements[key], key))
                placements[key].moving = moves[key]  # calls of the context wait until this has ended
            pause = asyncio.create_task(asyncio.sleep(POLL_S))
            await asyncio.wait([*moves.values(), pause])  # moves go on if this is cancelled
            done.update(key for key, move in moves.items() if not move.result())

    async def _find_contexts(self, handle: EngineHandle) -> set[ContextKey]:
        """The contexts that an engine says it has; placements of them are known from then on.

        This router may not have heard of all of them. It asks for those of all tenants that it has heard of, and of the
        tenant without a name.
        """
        engine = remote_engine(handle)
        found: set[ContextKey] = set()
        for tenant in {"", *self._placements.tenants()}:
            request = context_service_pb2.ListContextsRequest(limit=MAX_LISTED)
            while True:
                response = await engine.call(engine.contexts.ListContexts, Caller(tenant), request)
                if not response.contexts:
                    break
                for context in response.contexts:
                    key = ContextKey(tenant, context.context_id)
                    self._placements.add_unknown(key, handle)
                    found.add(key)
                request.page_token = response.contexts[-1].context_id
        return found

    async def move_to_adapter(self, key: ContextKey, adapter: str) -> bool:
        """Have an idle context go on at an engine that has the adapter of this name. Returns whether it did."""
        placement = self._placements.get(key)
        if placement is None or placement.handle.draining or not self._placements.idle([key]):
            return False
        before = placement.handle
        move = asyncio.create_task(self.migrate(placement, key, adapter))
        placement.moving = move  # calls of the context wait until this has ended
        await asyncio.wait([move])  # it goes on if this is cancelled
        return placement.handle is not before

    async def migrate(self, placement: Placement, key: ContextKey, adapter: str = "") -> bool:
        """Have an idle context go on at the least loaded engine of its model, which has the adapter of this name.

        Returns whether it was busy. Contexts of programs stay: programs make them anew when they go on elsewhere. An
        error on the way is not raised: the context is at one place afterwards.
        """
        caller = Caller(key.tenant, self._clock() + MIGRATION_TIMEOUT_S)
        with suppress(JaxctxError):
            request = context_service_pb2.GetContextRequest(context_id=key.context_id)
            engine = remote_engine(placement.handle)
            response = await engine.call(engine.contexts.GetContext, caller, request)
            context: Context = response.context
            fitting = [each for each in self._engines.by_load(context.model_id) if has_adapter_of(each, context)]
            if adapter:
                fitting = [each for each in fitting if adapter in each.engine.adapter_revisions]
            target = next(iter(fitting), placement.handle)
            is_busy = context.state == CONTEXT_STATE_BUSY
            is_programs = is_of_program(dict(context.labels))
            if target is placement.handle or target.draining or is_programs or is_busy:
                return is_busy and not is_programs
            await self._move(placement, key, target, context, caller)
        return False

    async def _move(
        self, placement: Placement, key: ContextKey, target: EngineHandle, context: Context, caller: Caller
    ) -> None:
        """Save a context, take it on the target engine, and only then close the old one.

        If anything fails the old one stays, and what was made on the target engine is closed.
        """
        old, new = remote_engine(placement.handle), remote_engine(target)
        name = f"moving-{secrets.token_hex(16)}"
        try:
            target.forwarded += 1  # if that engine leaves too, it waits for this
            try:
                saved_at = await save(old, caller, key, name)
                await take(new, caller, key, name, context, saved_at)
                try:
                    await restore_lifetime(new, caller, key, context, saved_at)
                    placement.handle = target
                finally:  # the other one must not be found: it is not moved any further
                    loser = old if placement.handle is target else new
                    await loser.close(Caller(key.tenant), key.context_id)
            finally:
                target.forwarded -= 1
        finally:  # the engine finds out by this, too, that the snapshot was taken
            request = snapshot_service_pb2.DeleteSnapshotRequest(name=name)
            await old.call(old.snapshots.DeleteSnapshot, caller, request)


def has_adapter_of(handle: EngineHandle, context: Context) -> bool:
    """Whether an engine can go on with the context: the contents of all of its adapters are loaded there."""
    revisions = {context.adapter_revision, *(span.adapter_revision for span in context.adapter_spans)}
    return revisions - {""} <= set(handle.engine.adapter_revisions.values())


def snapshot_ttl() -> Ttl:
    """How long the snapshot of a move is kept: if it is not taken, it expires."""
    return Ttl(duration=duration_to_proto(MIGRATION_TIMEOUT_S))


async def save(engine: RemoteEngine, caller: Caller, key: ContextKey, name: str) -> Timestamp:
    """Save a context for a move. Returns when that was."""
    request = snapshot_service_pb2.SaveRequest(context_id=key.context_id, name=name, durable=True, ttl=snapshot_ttl())
    response = await engine.call(engine.snapshots.Save, caller, request)
    return response.snapshot.created_at


async def take(
    engine: RemoteEngine, caller: Caller, key: ContextKey, name: str, context: Context, saved_at: Timestamp
) -> None:
    """Make the context anew from its snapshot, with its id, priority and pin.

    Its time to live is that of the snapshot until `restore_lifetime`, so that it ends by itself if the move breaks off.
    """
    request = snapshot_service_pb2.TakeRequest(
        context_id=key.context_id, name=name, ttl=snapshot_ttl(), priority=context.priority, pinned=context.pinned
    )
    if context.HasField("pinned_until"):
        request.pin_for.FromTimedelta(context.pinned_until.ToDatetime() - saved_at.ToDatetime())
    await engine.call(engine.snapshots.Take, caller, request)


async def restore_lifetime(
    engine: RemoteEngine, caller: Caller, key: ContextKey, context: Context, saved_at: Timestamp
) -> None:
    """Give the new context the labels and the time to live of the old one."""
    request = context_service_pb2.UpdateContextRequest(context_id=key.context_id)
    request.labels.labels.update(context.labels)
    request.labels.SetInParent()  # no labels, too, are all labels
    request.ttl.SetInParent()  # without a duration: for ever
    if context.HasField("expiry"):
        request.ttl.sliding = context.expiry.sliding
        if context.expiry.sliding:
            request.ttl.duration.CopyFrom(context.expiry.duration)
        else:
            request.ttl.duration.FromTimedelta(context.expiry.at.ToDatetime() - saved_at.ToDatetime())
    await engine.call(engine.contexts.UpdateContext, caller, request)
