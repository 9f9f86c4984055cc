"""Forwarding: a call goes unchanged to the engine that holds its context, and the response goes back unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic

from google.protobuf.message import Message

from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import RequestT, ResponseT, StubMethod, StubStreamMethod, engine_lost
from jaxctx.errors import AlreadyExists, FailedPrecondition, JaxctxError, NotFound, Unavailable
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.v1 import context_service_pb2, rules_pb2, snapshot_service_pb2
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.router.engines import RouterEngines, remote_engine
from jaxctx_server.router.leftovers import LeftoverContexts
from jaxctx_server.router.placement import ContextKey, CreatedKey, Placement, PlacementTable
from jaxctx_server.router.planning import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedCall(Generic[RequestT]):
    """A call that is forwarded to an engine."""

    caller: Caller
    request: RequestT
    context_id: str = ""  # the context that the call uses; empty: none, or more than one
    # Only engines of this model, or with this adapter, can answer ("": of the default model). None: any may.
    model_id: str | None = None
    # Whether it is new work, which a server that drains refuses: the method's option `work` (rules.proto).
    is_work: bool = False

    @property
    def context_key(self) -> ContextKey:
        """The key of the context that the call uses."""
        return ContextKey(self.caller.tenant, self.context_id)


@dataclass(slots=True)
class Refusals:
    """The errors of the engines that could not answer a call."""

    errors: list[JaxctxError] = field(default_factory=list)

    def add(self, error: JaxctxError) -> None:
        """Note the error of one engine. Raises it if other engines need not be asked."""
        if not isinstance(error, NotFound) and error.reason not in ("DRAINING", "MODEL_MISMATCH", "ADAPTER_MISMATCH"):
            raise error
        self.errors.append(error)

    def most_specific(self) -> JaxctxError | None:
        """The first error that is not NotFound, else the first one of an engine that has the context, else the first.

        None: no engine was asked.
        """
        for error in self.errors:
            if not isinstance(error, NotFound):
                return error
        for error in self.errors:
            if error.reason != "CONTEXT_NOT_FOUND":
                return error
        return self.errors[0] if self.errors else None


class Forwarder:
    """Forwards calls to the engines of a router. Used on the event loop."""

    def __init__(
        self,
        lifecycle: ServerLifecycle,
        engines: RouterEngines,
        placements: PlacementTable,
        planner: Planner,
        leftovers: LeftoverContexts,
    ) -> None:
        self._lifecycle = lifecycle
        self._engines = engines
        self._placements = placements
        self._planner = planner
        self._leftovers = leftovers

    async def ask(
        self, call: ForwardedCall[RequestT], method: StubMethod[RequestT, ResponseT]
    ) -> tuple[EngineHandle, ResponseT]:
        """The first engine that has the object of the call and does not drain, and its response.

        `method` chooses the method of the engine: `lambda engine: engine.contexts.Fill`.

        Raises the engine's error; Unavailable (DRAINING) for new work while the router drains; AlreadyExists for an id
        that is taken on any engine; Unavailable (ENGINE_LOST) while an engine that may have the object does not answer.
        """
        async with self._accepted(call):
            placement = await self._placement_of(call)
            refusals = Refusals()
            candidates = self._candidates(call, placement)
            for handle in candidates:
                try:
                    with forwarded(handle, call):
                        engine = remote_engine(handle)
                        return handle, await engine.call(method(engine), call.caller, call.request)
                except (NotFound, Unavailable, FailedPrecondition) as error:
                    refusals.add(error)
        raise self._refusal(refusals, placement, candidates)

    async def stream(
        self, call: ForwardedCall[RequestT], method: StubStreamMethod[RequestT, ResponseT]
    ) -> AsyncGenerator[tuple[EngineHandle, ResponseT], None]:
        """As `ask`, for a method that streams its responses."""
        async with self._accepted(call):
            placement = await self._placement_of(call)
            refusals = Refusals()
            candidates = self._candidates(call, placement)
            for handle in candidates:
                try:
                    with forwarded(handle, call):
                        engine = remote_engine(handle)
                        async with engine.started(method(engine), call.caller, call.request) as responses:
                            async for response in responses:
                                yield handle, response
                    return
                except (NotFound, Unavailable, FailedPrecondition) as error:
                    refusals.add(error)
        raise self._refusal(refusals, placement, candidates)

    def _candidates(self, call: ForwardedCall[Any], placement: Placement | None) -> list[EngineHandle]:
        """The engines to ask one after the other, first the one that holds the context; none that has what a move left
        behind, which is not the context.
        """
        holder = None if placement is None else placement.handle
        left_on = self._leftovers.engine_ids(call.context_key)
        found = self._engines.by_load(call.model_id, holder)
        return [handle for handle in found if handle is holder or handle.id not in left_on]

    async def _placement_of(self, call: ForwardedCall[Any]) -> Placement | None:
        """The placement of the context of the call, if it is remembered. Its first fill may move the context.

        Waits while the context moves: when the move has succeeded or failed, the context is on one engine.
        """
        placement = self._placements.use(call.context_key)
        if placement is None:
            return None
        if isinstance(call.request, context_service_pb2.FillRequest):
            self._planner.start_first_fill_move(placement, call.request, call.caller)
        placement.created = None  # the context changes now, so it can no longer be created again elsewhere
        if placement.moving is not None:
            await asyncio.wait([placement.moving])
        return placement

    def _refusal(self, refusals: Refusals, placement: Placement | None, asked: Sequence[EngineHandle]) -> JaxctxError:
        """The error of a call that none of the engines that were asked could answer."""
        error = refusals.most_specific() or self._engines.no_engine_error()
        was_lost = placement is not None and not has_same_process(placement.handle, asked)
        if isinstance(error, NotFound) and (self._engines.may_come_back() or was_lost):
            return engine_lost()
        return error

    @asynccontextmanager
    async def _accepted(self, call: ForwardedCall[Any]) -> AsyncIterator[None]:
        """While entered, a call is in progress. A drain refuses new work, and waits for work that was accepted before.

        If the request chooses an id or a name for the object that it makes, no object has it, and no other call can
        take it meanwhile. What this server drew itself is not looked for: an engine may not answer. Raises Unavailable
        (DRAINING), AlreadyExists.
        """
        programs = self._lifecycle.served().programs
        async with AsyncExitStack() as stack:
            if call.is_work:
                if programs.draining:
                    raise draining_error()
                programs.working.add(stack)
                stack.callback(programs.working.discard, stack)
            stack.enter_context(self._placements.in_use(call.context_key))
            for find_rpc, name in () if call.caller.draws_ids else chosen_names(call.request):
                lock = self._placements.creation_lock(CreatedKey(call.caller.tenant, find_rpc, name))
                await stack.enter_async_context(lock)
                await self._check_free(call.caller, find_rpc, name)
            yield

    async def _check_free(self, caller: Caller, find_rpc: str, name: str) -> None:
        """Raise AlreadyExists if any engine has an object of this id or name."""
        if find_rpc == "GetContext":
            key = ContextKey(caller.tenant, name)
            placement = self._placements.use(key)
            if placement is not None and placement.moving is not None:
                await asyncio.wait([placement.moving])
            self._placements.forget(key)  # a context of a lost engine can be made again
        with suppress(NotFound):
            await self.find(caller, find_rpc, name)
            raise AlreadyExists(f"there is {name!r} already")

    async def find(self, caller: Caller, find_rpc: str, name: str) -> None:
        """Look on all engines for the object of an id or a name, by the RPC that rules.proto names for it.

        The placement of a context that was found is remembered. Raises NotFound if there is no such object.
        """
        match find_rpc:
            case "GetContext":
                find_context = ForwardedCall(
                    caller=caller, request=context_service_pb2.GetContextRequest(context_id=name), context_id=name
                )
                handle, response = await self.ask(find_context, lambda engine: engine.contexts.GetContext)
                self._placements.remember(caller.tenant, handle, response.context)
            case "GetSnapshot":
                find_snapshot = ForwardedCall(caller=caller, request=snapshot_service_pb2.GetSnapshotRequest(name=name))
                await self.ask(find_snapshot, lambda engine: engine.snapshots.GetSnapshot)
            case _:
                raise ValueError(f"no method of a router finds what {find_rpc} does")


def has_same_process(handle: EngineHandle, others: Sequence[EngineHandle]) -> bool:
    """Whether an engine's process is among those of other handles: lost, and registered again with all that it has."""
    process = remote_engine(handle).incarnation
    return any(remote_engine(other).incarnation == process for other in others)


@contextmanager
def forwarded(handle: EngineHandle, call: ForwardedCall[Any]) -> Iterator[None]:
    """While entered, the engine works on the call. New work counts for the engine's load."""
    handle.forwarded += call.is_work
    try:
        yield
    finally:
        handle.forwarded -= call.is_work


def draining_error() -> Unavailable:
    """The error of new work while the router drains."""
    return Unavailable("the server is draining", reason="DRAINING", retry_after_s=5.0)


def chosen_names(request: Message) -> Iterator[tuple[str, str]]:
    """The ids and names that a request chooses for the objects that it makes, each with the RPC that finds them."""
    if isinstance(request, snapshot_service_pb2.SaveRequest) and request.overwrite_version:
        return  # the name must exist
    for descriptor, value in request.ListFields():
        find_rpc = descriptor.GetOptions().Extensions[rules_pb2.found_by]
        if find_rpc:
            for name in sorted(value) if descriptor.is_repeated else [value]:
                yield find_rpc, name
