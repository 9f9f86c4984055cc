"""Contexts go on at other engines, by way of a durable store that both have.

Those of an engine that leaves do, and one that switches to an adapter that its engine lacks.
"""

import asyncio
import enum
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx.convert import duration_to_proto
from jaxctx.engine.interface import Caller, is_of_program
from jaxctx.engine.remote import RemoteEngine
from jaxctx.errors import AlreadyExists, JaxctxError
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.v1 import context_service_pb2, snapshot_service_pb2
from jaxctx.v1.context_pb2 import CONTEXT_STATE_BUSY, Context
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx_server.router.engines import RouterEngines, remote_engine
from jaxctx_server.router.leftovers import LeftoverContexts
from jaxctx_server.router.placement import ContextKey, Placement, PlacementTable

MIGRATION_TIMEOUT_S = 60.0  # for a context of an engine that leaves to be on another one
MAX_MIGRATIONS = 8  # contexts that are on their way at once
MAX_LISTED = 1000  # entries that an engine returns at once at most
POLL_S = 0.1  # between looks for contexts that have become idle
MAX_PAUSE_S = 2.0  # before a context that could not be moved is tried again; at first it is POLL_S
log = logging.getLogger("jaxctx.server")


class MoveResult(enum.Enum):
    """What became of an attempt to move a context."""

    MOVED = "moved"
    NOT_NEEDED = "not needed"  # it has ended, or its program makes it anew
    LATER = "later"  # a call is at work on it, or what was in the way may pass
    STAYS = "stays"  # no engine takes it


@dataclass(slots=True)
class MoveAttempts:
    """The attempts to move one context so far."""

    refusals: Counter[str] = field(default_factory=Counter)  # that may pass, by id of the engine
    unfit: set[str] = field(default_factory=set)  # ids of engines that can never take it
    error: str = "no other engine that stays has its model and adapters"  # what was in the way last
    pause_s: float = 0.0  # before the next one
    next_at: float = 0.0  # the event loop's time

    def refuse(self, target: EngineHandle, error: JaxctxError) -> None:
        """Note that an engine did not take the context."""
        if error.is_retryable:
            self.refusals[target.id] += 1
        else:
            self.unfit.add(target.id)

    def try_later(self, now: float) -> None:
        """Wait with the next attempt, longer each time."""
        self.pause_s = min(2 * self.pause_s or POLL_S, MAX_PAUSE_S)
        self.next_at = now + self.pause_s


class Migrator:
    """Moves contexts between engines. Used on the event loop."""

    def __init__(
        self,
        engines: RouterEngines,
        placements: PlacementTable,
        leftovers: LeftoverContexts,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is that of deadlines."""
        self._engines = engines
        self._placements = placements
        self._leftovers = leftovers
        self._clock = clock

    async def evacuate(self, handle: EngineHandle) -> None:
        """Begin nothing more on an engine, and have its contexts go on elsewhere, each once no call is at work on it.

        Returns when all are elsewhere that can be, and no call is forwarded to the engine any more. Until then, or
        until this is cancelled, what is in the way of a move is waited for. The log says how many contexts stay.
        """
        handle.draining = True
        done, not_needed, attempts = set[ContextKey](), set[ContextKey](), dict[ContextKey, MoveAttempts]()
        now = asyncio.get_running_loop().time
        try:
            known = set(self._placements.on_engine(handle))
            ended = known - await self._find_contexts_in_time(handle)  # by themselves: the engine has them no more
            done, not_needed = set(ended), set(ended)
            while True:
                placements = self._placements.on_engine(handle)
                left = [key for key in placements if key not in done]
                if not left and not handle.forwarded:
                    return
                ready = [key for key in left if key not in attempts or attempts[key].next_at <= now()]
                moves: dict[ContextKey, asyncio.Task[MoveResult]] = {}
                for key in self._placements.idle(ready)[:MAX_MIGRATIONS]:
                    attempt = attempts.setdefault(key, MoveAttempts())
                    moves[key] = asyncio.create_task(self.migrate(placements[key], key, attempts=attempt))
                    placements[key].moving = moves[key]  # calls of the context wait until this has ended
                pause = asyncio.create_task(asyncio.sleep(POLL_S))
                await asyncio.wait([*moves.values(), pause])  # moves go on if this is cancelled
                for key, move in moves.items():
                    result = move.result()
                    if result is MoveResult.LATER:
                        attempts[key].try_later(now())
                        continue
                    done.add(key)
                    if result is MoveResult.NOT_NEEDED:
                        not_needed.add(key)
        finally:
            self._log_what_stays(handle, not_needed, attempts)

    def _log_what_stays(
        self, handle: EngineHandle, not_needed: set[ContextKey], attempts: dict[ContextKey, MoveAttempts]
    ) -> None:
        """Warn if an engine that leaves still has contexts that should be elsewhere."""
        stay = [key for key in self._placements.on_engine(handle) if key not in not_needed]
        if stay:
            errors = Counter(attempts[key].error for key in stay if key in attempts)
            in_the_way = "; ".join(f"{count} times: {error}" for error, count in errors.most_common(3))
            message = "engine %s leaves, and %d of its contexts could not be moved and end with it (%s)"
            log.warning(message, handle.id, len(stay), in_the_way or "there was no time to try")

    async def _find_contexts_in_time(self, handle: EngineHandle) -> set[ContextKey]:
        """As `_find_contexts`, of an engine that may have much to do: it is asked again if it refuses now."""
        pause_s = POLL_S
        while True:
            try:
                return await self._find_contexts(handle)
            except JaxctxError as error:
                if not error.is_retryable or error.reason == "ENGINE_LOST":
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _find_contexts(self, handle: EngineHandle) -> set[ContextKey]:
        """The contexts that an engine says it has, of all tenants; placements of them are known from then on.

        This router, which may be a new one, may not have heard of all of them.
        """
        engine = remote_engine(handle)
        found: set[ContextKey] = set()
        # Those that are known here as well: an engine of an older version does not name any.
        for tenant in {"", *self._placements.tenants(), *await self._find_tenants(engine)}:
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

    async def _find_tenants(self, engine: RemoteEngine) -> list[str]:
        """The names of all tenants that have contexts on an engine, but the empty name."""
        found: list[str] = []
        request = context_service_pb2.ListContextsRequest(limit=MAX_LISTED, tenants_only=True)
        while True:
            response = await engine.call(engine.contexts.ListContexts, Caller(), request)
            found += response.tenants
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

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

    async def migrate(
        self, placement: Placement, key: ContextKey, adapter: str = "", attempts: MoveAttempts | None = None
    ) -> MoveResult:
        """Have an idle context go on at another engine of its model, which has the adapter of this name.

        `attempts` are those so far, and get what this one finds out: it tries the least loaded of the engines that have
        refused the context least often. Contexts of programs stay: programs make them anew when they go on elsewhere.
        An error on the way is not raised: the context is at one place afterwards.
        """
        attempts = attempts or MoveAttempts()
        caller = Caller(key.tenant, self._clock() + MIGRATION_TIMEOUT_S)
        target: EngineHandle | None = None
        try:
            request = context_service_pb2.GetContextRequest(context_id=key.context_id)
            engine = remote_engine(placement.handle)
            response = await engine.call(engine.contexts.GetContext, caller, request)
            context: Context = response.context
            if is_of_program(dict(context.labels)):
                return MoveResult.NOT_NEEDED
            target = self._target(placement, key, context, adapter, attempts)
            if target is None:
                may_come = self._engines.may_come_back() or self._leftovers.engine_ids(key)
                return MoveResult.LATER if may_come else MoveResult.STAYS
            if context.state == CONTEXT_STATE_BUSY:
                attempts.error = "a call was at work on it"
                return MoveResult.LATER
            await self._move(placement, key, target, context, caller, attempts)
        except JaxctxError as error:
            target_refused = target is not None and target.id in attempts.unfit
            if error.reason in ("CONTEXT_NOT_FOUND", "CONTEXT_EXPIRED") and not target_refused:
                return MoveResult.NOT_NEEDED
            attempts.error = f"{error.reason}: {error.message}"
            may_succeed = error.is_retryable or target_refused  # the next time another engine is asked
            return MoveResult.LATER if may_succeed else MoveResult.STAYS
        return MoveResult.MOVED

    def _target(
        self, placement: Placement, key: ContextKey, context: Context, adapter: str, attempts: MoveAttempts
    ) -> EngineHandle | None:
        """The engine to try to move a context to; None if none is there that could have it."""
        fitting = [
            each
            for each in self._engines.by_load(context.model_id)
            if each is not placement.handle
            and not each.draining
            and each.id not in attempts.unfit
            and has_adapter_of(each, context)
            and (not adapter or adapter in each.engine.adapter_revisions)
            and each.id not in self._leftovers.engine_ids(key)  # where its id may still be taken
        ]
        return min(fitting, key=lambda each: attempts.refusals[each.id], default=None)

    async def _move(
        self,
        placement: Placement,
        key: ContextKey,
        target: EngineHandle,
        context: Context,
        caller: Caller,
        attempts: MoveAttempts,
    ) -> None:
        """Save a context, take it on the target engine, and only then close the old one.

        If anything fails the old one stays, and what was made on the target engine is closed. `attempts` gets the
        errors of the target engine.
        """
        source = placement.handle
        old, new = remote_engine(source), remote_engine(target)
        name = f"moving-{secrets.token_hex(16)}"
        try:
            target.forwarded += 1  # if that engine leaves too, it waits for this
            try:
                saved_at = await save(old, caller, key, name)
                leftover_on: EngineHandle | None = target
                try:
                    await take(new, caller, key, name, context, saved_at)
                    await restore_lifetime(new, caller, key, context, saved_at)
                    placement.handle, leftover_on = target, source
                except JaxctxError as error:
                    attempts.refuse(target, error)
                    if isinstance(error, AlreadyExists):  # another context, which this did not make
                        leftover_on = None
                    raise
                finally:  # the other one must not be found: it is not moved any further
                    if leftover_on is not None:
                        await self._leftovers.close(key, leftover_on)
            finally:
                target.forwarded -= 1
        finally:  # the engine finds out by this, too, that the snapshot was taken; if it fails, the snapshot expires
            request = snapshot_service_pb2.DeleteSnapshotRequest(name=name)
            with suppress(JaxctxError):
                await old.call(old.snapshots.DeleteSnapshot, caller, request)


def has_adapter_of(handle: EngineHandle, context: Context) -> bool:
    """Whether an engine can go on with the context: the contents of all of its adapters are loaded there."""
    revisions = {context.adapter_revision, *(span.adapter_revision for span in context.adapter_spans)}
    return revisions - {""} <= set(handle.engine.adapter_revisions.values())


def snapshot_ttl() -> Ttl:
    """How long the snapshot of a move is kept: if it is not taken, it expires."""
    return Ttl(duration=duration_to_proto(MIGRATION_TIMEOUT_S))


async def save(engine: RemoteEngine, caller: Caller, key: ContextKey, name: str) -> Timestamp:
    """Save a context for a move, which counts for no quota of its tenant. Returns when that was."""
    request = snapshot_service_pb2.SaveRequest(
        context_id=key.context_id, name=name, durable=True, ttl=snapshot_ttl(), for_move=True
    )
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
