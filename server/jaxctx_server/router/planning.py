"""The cost of a prompt on each engine (Plan), and the best engine for the first fill of a new context."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from jaxctx.engine.interface import Caller
from jaxctx.errors import AlreadyExists, JaxctxError, NotFound
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.router.engines import RouterEngines, remote_engine
from jaxctx_server.router.leftovers import LeftoverContexts
from jaxctx_server.router.placement import ContextKey, Placement

PLAN_TIMEOUT_S = (
    0.25  # for engines to say what a first fill would take; one that is too busy for that is none to move to
)
RECREATE_TIMEOUT_S = 10.0  # for making an empty context anew on another engine


class Planner:
    """Asks engines for plans, and chooses among them."""

    def __init__(self, engines: RouterEngines, leftovers: LeftoverContexts, clock: Callable[[], float]) -> None:
        """`clock` is that of deadlines."""
        self._engines = engines
        self._leftovers = leftovers
        self._clock = clock

    async def plans(self, caller: Caller, request: pb.PlanRequest) -> dict[EngineHandle, pb.PlanResponse]:
        """What each engine would do to fill a new context, the best one first: the one with most of it cached among
        those that have the pages, else the least loaded. Engines that raise an error are not there.
        """
        handles = self._engines.by_load(request.adapter or request.model_id)
        plans = await self._engines.ask_each(
            lambda engine: engine.contexts.Plan, caller, request, handles, ignore=JaxctxError
        )
        return dict(sorted(plans.items(), key=plan_order))

    def start_first_fill_move(self, placement: Placement, fill: pb.FillRequest, caller: Caller) -> None:
        """Begin to move a context that was created and is about to be filled first, if it may be better elsewhere.

        `placement.created` says how it was created.
        """
        created = placement.created
        if created is None or placement.moving is not None:
            return
        if not self._may_move(placement, created):
            return
        placement.moving = asyncio.create_task(self._move_empty(placement, created, fill, caller))

    def _may_move(self, placement: Placement, created: pb.CreateContextRequest) -> bool:
        """Whether another engine could make the context as it is."""
        try:
            handles = self._engines.by_load(created.adapter or created.model_id)
        except NotFound:  # its adapter is loaded nowhere any more: only where it is does it go on with that
            return False
        return any(handle is not placement.handle and _makes_equal(handle, placement, created) for handle in handles)

    async def _move_empty(
        self, placement: Placement, created: pb.CreateContextRequest, fill: pb.FillRequest, caller: Caller
    ) -> None:
        """Make an empty context anew on the engine that has the least to do for its first fill.

        If anything fails it stays where it is, and none of its id stays elsewhere. So it does if the new one has
        another adapter: the name may have got other content since the context was created, on some engines before
        others. The deadline of the fill does not matter here.
        """
        with suppress(JaxctxError):
            plan_caller = replace(caller, deadline=self._clock() + PLAN_TIMEOUT_S)
            plans = await self.plans(plan_caller, plan_of_first_fill(created, fill))
            old = placement.handle
            best = next((each for each in plans if each is old or _makes_equal(each, placement, created)), old)
            if best is old:
                return
            if await self._create_on(best, created, caller) == placement.adapter_revision:
                left_on, placement.handle = old, best
            else:
                left_on = best
            await self._leftovers.close(ContextKey(caller.tenant, created.context_id), left_on)

    async def _create_on(self, handle: EngineHandle, created: pb.CreateContextRequest, caller: Caller) -> str:
        """Make a context on an engine, or have none there. Returns the content of its adapter ("": it has none).

        Raises the engine's error.
        """
        engine = remote_engine(handle)
        move_caller = replace(caller, deadline=self._clock() + RECREATE_TIMEOUT_S)
        try:
            response = await engine.call(engine.contexts.CreateContext, move_caller, created)
            return response.context.adapter_revision
        except AlreadyExists:  # one that this did not make
            raise
        except BaseException:  # the engine may have made it all the same
            self._leftovers.close_later(ContextKey(caller.tenant, created.context_id), handle)
            raise


def _makes_equal(handle: EngineHandle, placement: Placement, created: pb.CreateContextRequest) -> bool:
    """Whether a context that an engine makes by the same request has the same adapter content, as far as is known."""
    if not placement.adapter_revision:
        return True
    return handle.engine.adapter_revisions.get(created.adapter or created.model_id) == placement.adapter_revision


def plan_order(planned: tuple[EngineHandle, pb.PlanResponse]) -> tuple[bool, bool, int, float]:
    """The sort key of an engine with its plan: the best one first."""
    handle, plan = planned
    lacks_pages = plan.pages_needed > plan.pages_available
    return handle.draining, lacks_pages, -(plan.resident + plan.restored), handle.load


def plan_of_first_fill(created: pb.CreateContextRequest, fill: pb.FillRequest) -> pb.PlanRequest:
    """The Plan request that asks what the first fill of a new context would take."""
    plan = pb.PlanRequest(model_id=created.model_id, salt=created.salt, adapter=created.adapter)
    match fill.WhichOneof("content"):
        case "text":
            plan.text = fill.text
        case "tokens":
            plan.tokens.CopyFrom(fill.tokens)
        case "messages":
            plan.messages.CopyFrom(fill.messages)
    if fill.HasField("add_special_tokens"):
        plan.add_special_tokens = fill.add_special_tokens
    return plan
