"""Contexts of an engine that leaves go on at another one: in which order, which stay, and what an error leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx import errors
from jaxctx.engine.interface import PROGRAM_LABELS, Caller
from jaxctx.types import ContextState, CreateContextRequest, Ttl
from jaxctx.v1 import context_service_pb2, snapshot_service_pb2
from jaxctx.v1.context_pb2 import Context
from jaxctx_server.router import migration
from jaxctx_server.router.leftovers import CLOSE_TIMEOUT_S
from jaxctx_server.router.migration import MIGRATION_TIMEOUT_S, MoveResult, restore_lifetime, take
from jaxctx_server.router.placement import ContextKey, Placement
from tests.server.router.fake_router import NOW, FakeRemoteEngine, FakeRouter

ALICE = Caller("alice")
KEY = ContextKey("alice", "x")
SAVED_AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "POLL_S", 0.005)
    monkeypatch.setattr(migration, "MAX_PAUSE_S", 0.01)


def at(seconds: float) -> Timestamp:
    """A time so many seconds after a context was saved."""
    time = Timestamp()
    time.FromDatetime(SAVED_AT + timedelta(seconds=seconds))
    return time


async def add_context(router: FakeRouter, key: ContextKey = KEY, **fields: Any) -> Placement:
    """A context on the engine "a", which the router knows."""
    request = CreateContextRequest(context_id=key.context_id, **fields)
    await router.connections["a"].fake.create(Caller(key.tenant), request)
    router.placements.add_unknown(key, router.handle("a"))
    placement = router.placements.get(key)
    assert placement is not None
    return placement


def has(router: FakeRouter, address: str, key: ContextKey = KEY) -> bool:
    return tuple(key) in router.connections[address].fake.contexts


def asked(connection: FakeRemoteEngine) -> list[str]:
    return [name for name, _, _ in connection.requests]


async def migrate(router: FakeRouter, placement: Placement, key: ContextKey = KEY) -> MoveResult:
    """Migrate a context of the engine "a", which leaves."""
    router.handle("a").draining = True
    async with asyncio.timeout(10):
        return await router.migrator.migrate(placement, key)


async def evacuate(router: FakeRouter) -> None:
    async with asyncio.timeout(10):
        await router.migrator.evacuate(router.handle("a"))


# --- one context ------------------------------------------------------------------------------------------------------


async def test_a_context_is_saved_taken_elsewhere_and_only_then_closed(router: FakeRouter) -> None:
    placement = await add_context(router)
    assert await migrate(router, placement) is MoveResult.MOVED
    assert placement.handle is router.handle("b")
    assert (has(router, "a"), has(router, "b")) == (False, True)
    assert asked(router.connections["a"]) == ["GetContext", "Save", "CloseContext", "DeleteSnapshot"]
    assert asked(router.connections["b"]) == ["Take", "UpdateContext"]
    (save,) = router.connections["a"].requests_of("Save")
    assert save.durable
    assert save.for_move
    assert save.ttl.duration.seconds == MIGRATION_TIMEOUT_S
    (taken,) = router.connections["b"].requests_of("Take")
    assert (taken.context_id, taken.name) == ("x", save.name)
    (deleted,) = router.connections["a"].requests_of("DeleteSnapshot")
    assert deleted.name == save.name
    assert router.handle("b").forwarded == 0


async def test_a_move_is_made_for_the_tenant_within_its_time(router: FakeRouter) -> None:
    placement = await add_context(router)
    await migrate(router, placement)
    callers = {name: caller for connection in router.connections.values() for name, caller, _ in connection.requests}
    assert callers.pop("CloseContext") == Caller("alice", NOW + CLOSE_TIMEOUT_S)  # whatever time is left
    assert set(callers.values()) == {Caller("alice", NOW + MIGRATION_TIMEOUT_S)}


async def test_names_of_moves_are_not_the_same(router: FakeRouter) -> None:
    for context_id in ("x", "y"):
        key = ContextKey("alice", context_id)
        await migrate(router, await add_context(router, key), key)
    names = [request.name for request in router.connections["a"].requests_of("Save")]
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    ("fields", "result"),
    [({"labels": dict(PROGRAM_LABELS)}, MoveResult.NOT_NEEDED), ({}, MoveResult.LATER)],
    ids=["of a program", "busy"],
)
async def test_contexts_that_stay_and_whether_they_may_go_later(
    router: FakeRouter, fields: dict[str, Any], result: MoveResult
) -> None:
    placement = await add_context(router, **fields)
    if result is MoveResult.LATER:
        set_state(router, ContextState.BUSY)
    assert await migrate(router, placement) is result
    assert placement.handle is router.handle("a")
    assert asked(router.connections["a"]) == ["GetContext"]


def set_state(router: FakeRouter, state: ContextState) -> None:
    context = router.connections["a"].fake.contexts[tuple(KEY)]
    context.info = replace(context.info, state=state)


async def test_a_context_stays_if_all_other_engines_drain(router: FakeRouter) -> None:
    router.handle("a").draining = router.handle("b").draining = True
    placement = await add_context(router)
    assert await migrate(router, placement) is MoveResult.STAYS
    assert placement.handle is router.handle("a")
    assert asked(router.connections["b"]) == []
    assert asked(router.connections["a"]) == ["GetContext"]


async def test_a_context_goes_to_an_engine_of_its_model_only(router: FakeRouter) -> None:
    router.lose("b")
    router.add_engine("c", model_id="other")
    router.handle("a").draining = True
    placement = await add_context(router)
    await migrate(router, placement)
    assert placement.handle is router.handle("a")
    assert asked(router.connections["c"]) == []


@pytest.mark.parametrize("rpc", ["Take", "UpdateContext"])
async def test_a_move_that_fails_leaves_the_context_where_it_was_and_nothing_elsewhere(
    router: FakeRouter, rpc: str
) -> None:
    placement = await add_context(router)
    router.connections["b"].errors[rpc] = [errors.ResourceExhausted("it is full")]
    assert await migrate(router, placement) is MoveResult.LATER, "another engine may take it"
    assert placement.handle is router.handle("a")
    assert (has(router, "a"), has(router, "b")) == (True, False)
    assert "CloseContext" not in asked(router.connections["a"])
    assert asked(router.connections["a"])[-1] == "DeleteSnapshot"
    assert router.handle("b").forwarded == 0


async def test_a_context_that_cannot_be_saved_stays(router: FakeRouter) -> None:
    placement = await add_context(router)
    router.connections["a"].errors["Save"] = [errors.FailedPrecondition("no store", reason="NO_STORE")]
    assert await migrate(router, placement) is MoveResult.STAYS
    assert (placement.handle, asked(router.connections["b"])) == (router.handle("a"), [])


async def test_a_context_that_has_ended_is_not_moved(router: FakeRouter) -> None:
    placement = Placement(router.handle("a"))
    assert await migrate(router, placement) is MoveResult.NOT_NEEDED
    assert asked(router.connections["a"]) == ["GetContext"]


async def test_a_move_that_is_cancelled_leaves_one_context(router: FakeRouter) -> None:
    placement = await add_context(router)
    router.connections["b"].gates["UpdateContext"] = asyncio.Event()
    moving = asyncio.create_task(migrate(router, placement))
    await router.connections["b"].until_asked("UpdateContext")
    moving.cancel()
    await asyncio.wait([moving])
    assert moving.cancelled()
    assert (has(router, "a"), has(router, "b")) == (True, False)
    assert asked(router.connections["a"])[-1] == "DeleteSnapshot"


async def test_while_a_context_is_on_its_way_its_new_engine_has_more_load(router: FakeRouter) -> None:
    """So that it waits for that if it leaves too."""
    placement = await add_context(router)
    router.connections["b"].gates["Take"] = asyncio.Event()
    moving = asyncio.create_task(migrate(router, placement))
    await router.connections["b"].until_asked("Take")
    assert router.handle("b").forwarded == 1
    router.connections["b"].gates["Take"].set()
    await moving
    assert router.handle("b").forwarded == 0


# --- what a context keeps ---------------------------------------------------------------------------------------------


async def taken(router: FakeRouter, context: Context) -> snapshot_service_pb2.TakeRequest:
    """How a context that was saved at SAVED_AT is taken on another engine."""
    await take(router.connections["b"], ALICE, KEY, "n", context, at(0))
    (request,) = router.connections["b"].requests_of("Take")
    return request  # type: ignore[no-any-return]


async def test_priority_and_pin_are_kept(router: FakeRouter) -> None:
    request = await taken(router, Context(priority=7, pinned=True))
    assert (request.priority, request.pinned, request.HasField("pin_for")) == (7, True, False)


async def test_a_pin_ends_when_it_was_to_end(router: FakeRouter) -> None:
    request = await taken(router, Context(pinned=True, pinned_until=at(12.5)))
    assert request.pin_for.ToTimedelta() == timedelta(seconds=12.5)


async def restored(router: FakeRouter, context: Context) -> context_service_pb2.UpdateContextRequest:
    """The update that gives a new context the lifetime of one that was saved at SAVED_AT."""
    await router.connections["b"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    await restore_lifetime(router.connections["b"], ALICE, KEY, context, at(0))
    (request,) = router.connections["b"].requests_of("UpdateContext")
    return request  # type: ignore[no-any-return]


@pytest.mark.parametrize("labels", [{}, {"a": "b"}])
async def test_labels_are_kept_and_no_others_are_added(router: FakeRouter, labels: dict[str, str]) -> None:
    request = await restored(router, Context(labels=labels))
    assert request.HasField("labels")
    assert dict(request.labels.labels) == labels


async def test_a_context_that_is_for_ever_stays_so(router: FakeRouter) -> None:
    request = await restored(router, Context())
    assert request.HasField("ttl")
    assert not request.ttl.HasField("duration")


async def test_a_context_ends_when_it_was_to_end(router: FakeRouter) -> None:
    context = Context()
    context.expiry.at.CopyFrom(at(30.25))
    context.expiry.duration.CopyFrom(Duration(seconds=900))
    request = await restored(router, context)
    assert request.ttl.duration.ToTimedelta() == timedelta(seconds=30.25)
    assert not request.ttl.sliding


async def test_a_time_to_live_that_begins_again_at_each_use_does_so_now(router: FakeRouter) -> None:
    context = Context()
    context.expiry.at.CopyFrom(at(30.25))
    context.expiry.duration.CopyFrom(Duration(seconds=900))
    context.expiry.sliding = True
    request = await restored(router, context)
    assert (request.ttl.duration.seconds, request.ttl.sliding) == (900, True)


async def test_a_moved_context_has_its_lifetime(router: FakeRouter) -> None:
    placement = await add_context(router, ttl=Ttl(300.25, sliding=True), labels={"a": "b"})
    await migrate(router, placement)
    (request,) = router.connections["b"].requests_of("UpdateContext")
    assert (request.context_id, dict(request.labels.labels), request.ttl.sliding) == ("x", {"a": "b"}, True)


# --- all contexts of an engine ----------------------------------------------------------------------------------------


async def test_an_engine_that_leaves_drains_and_its_contexts_are_elsewhere(router: FakeRouter) -> None:
    keys = [ContextKey("alice", "x"), ContextKey("alice", "y"), ContextKey("bob", "x"), ContextKey("", "z")]
    for key in keys:
        await add_context(router, key)
    await evacuate(router)
    assert router.handle("a").draining
    assert [has(router, "b", key) for key in keys] == [True] * 4
    assert router.placements.on_engine(router.handle("a")) == {}


async def test_contexts_that_the_router_has_not_heard_of_go_too(router: FakeRouter) -> None:
    """It may have been started anew since their tenants called."""
    fake = router.connections["a"].fake
    for n in range(3):
        await fake.create(ALICE, CreateContextRequest(context_id=f"x{n}"))
    await fake.create(Caller("bob"), CreateContextRequest(context_id="x0"))
    await fake.create(Caller(), CreateContextRequest(context_id="y"))
    await evacuate(router)
    assert router.connections["a"].fake.contexts == {}
    assert len(router.connections["b"].fake.contexts) == 5


async def test_an_engine_lists_its_tenants_page_by_page(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MAX_LISTED", 2)
    for n in range(5):
        await router.connections["a"].fake.create(Caller(f"t{n}"), CreateContextRequest(context_id="x"))
    await evacuate(router)
    assert len(router.connections["b"].fake.contexts) == 5


async def test_contexts_of_an_engine_that_names_no_tenants_go_if_their_tenants_have_called(router: FakeRouter) -> None:
    """It is of an older version."""
    fake = router.connections["a"].fake
    await fake.create(ALICE, CreateContextRequest(context_id="x"))
    router.placements.add_unknown(ContextKey("alice", "elsewhere"), router.handle("b"))

    async def none(*_: Any) -> list[str]:
        return []

    fake.tenants = none  # type: ignore[method-assign]
    await evacuate(router)
    assert has(router, "b")


async def test_an_engine_lists_its_contexts_page_by_page(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MAX_LISTED", 2)
    for n in range(5):
        await router.connections["a"].fake.create(Caller(), CreateContextRequest(context_id=f"x{n}"))
    await evacuate(router)
    assert len(router.connections["b"].fake.contexts) == 5


async def test_a_context_that_the_engine_has_no_more_is_not_waited_for(router: FakeRouter) -> None:
    router.placements.add_unknown(KEY, router.handle("a"))
    await evacuate(router)
    assert "GetContext" not in asked(router.connections["a"])


async def test_a_context_that_calls_are_at_work_on_goes_when_they_have_ended(router: FakeRouter) -> None:
    placement = await add_context(router)
    other = await add_context(router, ContextKey("alice", "y"))
    with router.placements.in_use(KEY):
        evacuating = asyncio.create_task(evacuate(router))
        async with asyncio.timeout(10):
            while other.handle is not router.handle("b"):
                await asyncio.sleep(0.001)
        assert placement.handle is router.handle("a")
        assert not evacuating.done()
    await evacuating
    assert placement.handle is router.handle("b")


async def test_a_busy_context_is_tried_again(router: FakeRouter) -> None:
    placement = await add_context(router)
    set_state(router, ContextState.BUSY)
    evacuating = asyncio.create_task(evacuate(router))
    await router.connections["a"].until_asked("GetContext", times=3)
    set_state(router, ContextState.IDLE)
    await evacuating
    assert placement.handle is router.handle("b")


async def test_a_context_that_cannot_be_moved_is_left_behind(router: FakeRouter) -> None:
    placement = await add_context(router)
    router.connections["b"].errors["Take"] = [errors.ResourceExhausted("it is full")]
    await evacuate(router)
    assert placement.handle is router.handle("a")
    assert len(router.connections["b"].requests_of("Take")) == 1, "it is not tried again"


QUEUE_FULL = errors.ResourceExhausted("no pages now", reason="QUEUE_FULL", retry_after_s=1.0)
ENGINE_LOST = errors.Unavailable("it does not answer", reason="ENGINE_LOST")


@pytest.mark.parametrize("error", [QUEUE_FULL, ENGINE_LOST], ids=lambda each: each.reason)
@pytest.mark.parametrize(
    ("address", "rpc"), [("a", "GetContext"), ("a", "Save"), ("b", "Take"), ("b", "UpdateContext")]
)
async def test_a_move_that_fails_by_chance_is_tried_again(
    router: FakeRouter, caplog: pytest.LogCaptureFixture, error: errors.JaxctxError, address: str, rpc: str
) -> None:
    placement = await add_context(router)
    router.connections[address].errors[rpc] = [error, error]
    await evacuate(router)
    assert placement.handle is router.handle("b")
    assert (has(router, "a"), has(router, "b")) == (False, True)
    assert caplog.records == []


@pytest.mark.parametrize("error", [QUEUE_FULL, errors.FailedPrecondition("no store", reason="NO_STORE")], ids=str)
async def test_what_one_engine_does_not_take_another_one_does(router: FakeRouter, error: errors.JaxctxError) -> None:
    router.add_engine("c")
    placement = await add_context(router)
    router.connections["b"].errors["Take"] = [error] * 100
    await evacuate(router)
    assert placement.handle is router.handle("c")
    assert len(router.connections["b"].requests_of("Take")) == 1, "the least loaded one is asked first, and once"


async def test_contexts_go_on_their_way_while_others_cannot(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "MAX_MIGRATIONS", 1)
    monkeypatch.setattr(migration, "MAX_PAUSE_S", 0.1)
    await add_context(router)
    other = await add_context(router, ContextKey("alice", "y"))
    set_state(router, ContextState.BUSY)
    evacuating = asyncio.create_task(evacuate(router))
    async with asyncio.timeout(10):
        while other.handle is not router.handle("b"):
            await asyncio.sleep(0.001)
    set_state(router, ContextState.IDLE)
    await evacuating


async def test_an_engine_that_may_come_back_is_waited_for(router: FakeRouter) -> None:
    placement = await add_context(router)
    connection = router.connections["b"]
    router.lose("b", may_come_back=True)
    evacuating = asyncio.create_task(evacuate(router))
    await router.connections["a"].until_asked("GetContext", times=3)
    assert not evacuating.done()
    back = router.state.engines.register("b", connection, connection.encode)
    await evacuating
    assert placement.handle is back


async def test_the_log_says_how_many_contexts_stay(router: FakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(3):
        await add_context(router, ContextKey("alice", f"x{n}"))
    await add_context(router, ContextKey("alice", "p"), labels=dict(PROGRAM_LABELS))
    router.placements.add_unknown(ContextKey("alice", "ended"), router.handle("a"))
    router.connections["a"].errors["Save"] = [errors.ResourceExhausted("too many", reason="QUOTA")] * 2
    await evacuate(router)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("engine a leaves, and 2 of its contexts could not be moved")
    assert "2 times: QUOTA: too many" in record.getMessage()


async def test_the_log_says_what_stays_when_the_time_is_up(
    router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    await add_context(router)
    router.connections["b"].errors["Take"] = [QUEUE_FULL] * 1000
    evacuating = asyncio.create_task(evacuate(router))
    await router.connections["b"].until_asked("Take", times=3)
    evacuating.cancel()
    await asyncio.wait([evacuating])
    (record,) = caplog.records
    assert record.getMessage().startswith("engine a leaves, and 1 of its contexts could not be moved")


async def test_a_context_is_not_taken_where_a_copy_of_it_is_still_to_be_closed(router: FakeRouter) -> None:
    placement = await add_context(router)
    gate = router.connections["b"].gates["CloseContext"] = asyncio.Event()
    router.leftovers.close_later(KEY, router.handle("b"))
    evacuating = asyncio.create_task(evacuate(router))
    await router.connections["a"].until_asked("GetContext", times=2)
    assert router.connections["b"].requests_of("Take") == []
    gate.set()
    await evacuating
    assert placement.handle is router.handle("b")


async def test_another_context_of_its_id_on_the_target_is_not_closed(router: FakeRouter) -> None:
    placement = await add_context(router)
    await router.connections["b"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    assert await migrate(router, placement) is MoveResult.LATER
    assert (placement.handle, has(router, "b")) == (router.handle("a"), True)


async def test_an_old_context_that_could_not_be_closed_is_closed_later(router: FakeRouter) -> None:
    placement = await add_context(router)
    router.connections["a"].errors["CloseContext"] = [ENGINE_LOST]
    assert await migrate(router, placement) is MoveResult.MOVED
    async with asyncio.timeout(10):
        while has(router, "a"):
            await asyncio.sleep(0.001)
    assert has(router, "b")


async def test_an_engine_leaves_when_no_call_runs_there_any_more(router: FakeRouter) -> None:
    router.handle("a").forwarded = 1
    evacuating = asyncio.create_task(evacuate(router))
    await asyncio.sleep(0.02)
    assert not evacuating.done()
    router.handle("a").forwarded = 0
    await evacuating


async def test_only_some_contexts_are_on_their_way_at_once(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MAX_MIGRATIONS", 2)
    for n in range(5):
        await add_context(router, ContextKey("alice", f"x{n}"))
    gate = router.connections["b"].gates["Take"] = asyncio.Event()
    evacuating = asyncio.create_task(evacuate(router))
    await router.connections["b"].until_asked("Take")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(router.connections["b"].requests_of("Take")) == 2
    gate.set()
    await evacuating
    assert len(router.connections["b"].fake.contexts) == 5


async def test_calls_of_a_context_can_wait_for_its_move(router: FakeRouter) -> None:
    placement = await add_context(router)
    gate = router.connections["b"].gates["Take"] = asyncio.Event()
    evacuating = asyncio.create_task(evacuate(router))
    await router.connections["b"].until_asked("Take")
    assert placement.moving is not None
    assert not placement.moving.done()
    gate.set()
    await evacuating
    assert placement.moving.done()


async def test_an_engine_with_much_to_do_is_asked_again_what_it_has(router: FakeRouter) -> None:
    """Else nothing of it would be moved."""
    await add_context(router)
    busy = errors.ResourceExhausted("as many calls as may be", reason="QUEUE_FULL", retry_after_s=1.0)
    router.connections["a"].errors["ListContexts"] = [busy, busy]
    await evacuate(router)
    assert (has(router, "a"), has(router, "b")) == (False, True)


async def test_an_engine_that_does_not_answer_cannot_be_evacuated(router: FakeRouter) -> None:
    router.connections["a"].errors["ListContexts"] = [errors.Unavailable("it is gone", reason="ENGINE_LOST")]
    with pytest.raises(errors.Unavailable):
        await evacuate(router)
