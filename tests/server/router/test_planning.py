"""What a router asks of engines before a first fill, and how it chooses among their answers."""

import asyncio
from types import SimpleNamespace
from typing import Any

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import CreateContextRequest
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.router.placement import ContextKey, Placement
from jaxctx_server.router.planning import PLAN_TIMEOUT_S, RECREATE_TIMEOUT_S, plan_of_first_fill, plan_order
from tests.server.router.fake_router import NOW, FakeRouter


def engine(load: float, draining: bool = False) -> Any:
    return SimpleNamespace(load=load, draining=draining)


def plan(resident: int = 0, restored: int = 0, pages_needed: int = 1, pages_available: int = 9) -> pb.PlanResponse:
    return pb.PlanResponse(
        resident=resident, restored=restored, pages_needed=pages_needed, pages_available=pages_available
    )


def test_most_cached_then_least_loaded_and_those_that_lack_pages_or_drain_last() -> None:
    best = (engine(5.0), plan(resident=3, restored=3))
    second = (engine(0.1), plan(resident=5))
    third = (engine(0.2), plan(resident=5))
    full = (engine(0.0), plan(resident=9, pages_needed=10))
    draining = (engine(0.0, draining=True), plan(resident=9))
    assert sorted([draining, full, third, second, best], key=plan_order) == [best, second, third, full, draining]


def test_a_plan_asks_about_the_content_of_the_fill() -> None:
    created = pb.CreateContextRequest(context_id="a", model_id="m", salt="s", priority=5)
    for content in (
        {"text": "hello", "add_special_tokens": False},
        {"tokens": {"ids": [1, 2]}},
        {"messages": {"messages": [{"role": "user", "content": "hello"}]}},
    ):
        fill = pb.FillRequest(context_id="a", defer=True, **content)  # type: ignore[arg-type]
        expected = pb.PlanRequest(model_id="m", salt="s", **content)  # type: ignore[arg-type]
        assert plan_of_first_fill(created, fill) == expected


ALICE = Caller("alice", 1060.0)
CREATED = pb.CreateContextRequest(context_id="x", salt="s", priority=5)
FILL = pb.FillRequest(context_id="x", text="hello")


async def create_on_a(router: FakeRouter) -> Placement:
    """The context "x", which was just created on engine "a"."""
    await router.connections["a"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    return Placement(router.handle("a"), created=CREATED)


async def move(router: FakeRouter, placement: Placement) -> None:
    """Begin the move before a first fill, and wait until it has ended."""
    router.planner.start_first_fill_move(placement, FILL, ALICE)
    if placement.moving is not None:
        await placement.moving


async def test_plans_come_the_best_first_without_engines_that_fail(router: FakeRouter) -> None:
    router.add_engine("c")
    for address, resident in (("a", 1), ("b", 5), ("c", 9)):
        router.connections[address].responses["Plan"] = plan(resident)
    router.connections["c"].errors["Plan"] = [errors.DeadlineExceeded("too busy")]
    plans = await router.planner.plans(ALICE, pb.PlanRequest(text="hello"))
    assert [(handle.id, found.resident) for handle, found in plans.items()] == [("b", 5), ("a", 1)]


async def test_only_engines_of_the_model_plan(router: FakeRouter) -> None:
    router.add_engine("c", model_id="other")
    plans = await router.planner.plans(ALICE, pb.PlanRequest(model_id="other", text="hello"))
    assert [handle.id for handle in plans] == ["c"]


async def test_an_empty_context_is_made_anew_where_most_is_cached_and_closed_where_it_was(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    router.connections["b"].responses["Plan"] = plan(9)
    await move(router, placement)
    assert placement.handle is router.handle("b")
    assert router.connections["b"].requests_of("CreateContext") == [CREATED]
    assert ("alice", "x") in router.connections["b"].fake.contexts
    assert ("alice", "x") not in router.connections["a"].fake.contexts


async def test_the_deadlines_of_a_move_are_its_own(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    router.connections["b"].responses["Plan"] = plan(9)
    await move(router, placement)
    callers = {name: caller for name, caller, _ in router.connections["b"].requests}
    assert callers["Plan"] == Caller("alice", NOW + PLAN_TIMEOUT_S)
    assert callers["CreateContext"] == Caller("alice", NOW + RECREATE_TIMEOUT_S)


async def test_a_context_stays_where_it_is_best(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    router.connections["a"].responses["Plan"] = plan(9)
    await move(router, placement)
    assert placement.handle is router.handle("a")
    assert router.connections["b"].requests_of("CreateContext") == []
    assert ("alice", "x") in router.connections["a"].fake.contexts


async def test_a_context_stays_if_it_cannot_be_made_elsewhere(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    router.connections["b"].responses["Plan"] = plan(9)
    router.connections["b"].errors["CreateContext"] = [errors.ResourceExhausted("it is full")]
    await move(router, placement)
    assert placement.handle is router.handle("a")
    assert ("alice", "x") in router.connections["a"].fake.contexts


async def until_gone(router: FakeRouter, address: str) -> None:
    """Wait until an engine has no context "x"."""
    async with asyncio.timeout(10):
        while ("alice", "x") in router.connections[address].fake.contexts:
            await asyncio.sleep(0.001)


async def test_an_old_context_that_could_not_be_closed_at_once_is_closed_later(router: FakeRouter) -> None:
    """Or calls would go on with it, empty as it is, when the engine of the new one is lost."""
    placement = await create_on_a(router)
    router.connections["b"].responses["Plan"] = plan(9)
    router.connections["a"].errors["CloseContext"] = [errors.Unavailable("it is gone", reason="ENGINE_LOST")]
    await move(router, placement)
    assert placement.handle is router.handle("b")
    await until_gone(router, "a")
    assert ("alice", "x") in router.connections["b"].fake.contexts


async def test_a_context_that_an_engine_may_have_made_is_closed_there(router: FakeRouter) -> None:
    """If the answer is lost it stays where it was, and only there."""
    placement = await create_on_a(router)
    router.connections["b"].responses["Plan"] = plan(9)
    await router.connections["b"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    router.connections["b"].errors["CreateContext"] = [errors.DeadlineExceeded("the answer is lost")]
    await move(router, placement)
    assert placement.handle is router.handle("a")
    await until_gone(router, "b")
    assert ("alice", "x") in router.connections["a"].fake.contexts


async def test_another_context_of_its_id_is_not_closed(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    router.connections["b"].responses["Plan"] = plan(9)
    router.connections["b"].errors["CreateContext"] = [errors.AlreadyExists("there is one")]
    await move(router, placement)
    assert placement.handle is router.handle("a")
    assert not router.leftovers.engine_ids(ContextKey("alice", "x"))


async def test_a_context_stays_if_no_engine_has_a_plan(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    for connection in router.connections.values():
        connection.errors["Plan"] = [errors.DeadlineExceeded("too busy")]
    await move(router, placement)
    assert placement.handle is router.handle("a")


async def test_there_is_no_move_without_another_engine_of_the_model(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    router.lose("b")
    router.add_engine("c", model_id="other")
    await move(router, placement)
    assert placement.moving is None


async def test_only_a_context_that_was_just_created_is_moved_and_only_once(router: FakeRouter) -> None:
    placement = await create_on_a(router)
    placement.created = None
    await move(router, placement)
    assert placement.moving is None
    placement.created = CREATED
    router.planner.start_first_fill_move(placement, FILL, ALICE)
    first = placement.moving
    router.planner.start_first_fill_move(placement, FILL, ALICE)
    assert placement.moving is first
    assert first is not None
    await asyncio.wait([first])
