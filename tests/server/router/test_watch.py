"""WatchContexts of a router: the changes on all engines as one stream, begun anew when an engine comes or goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.programs.sessions import Programs
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import Context
from jaxctx_server.router import watch as watch_module
from jaxctx_server.router.placement import ContextKey
from tests.server.router.fake_router import FakeRouter

ALICE = Caller("alice", 1060.0)
REQUEST = pb.WatchContextsRequest(include_program_contexts=True)
Changes = AsyncGenerator[pb.WatchContextsResponse, None]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "POLL_S", 0.01)
    monkeypatch.setattr(watch_module, "RESTART_PAUSE_S", 0.0)


@pytest.fixture
def watched(router: FakeRouter) -> FakeRouter:
    """A router whose engines say of contexts what a test puts into their queues."""
    for connection in router.connections.values():
        connection.streams["WatchContexts"] = asyncio.Queue()
    return router


@pytest.fixture
async def changes(watched: FakeRouter) -> AsyncIterator[Changes]:
    changes = watched.watcher.watch(ALICE, REQUEST)
    yield changes
    await changes.aclose()


def put(
    router: FakeRouter, address: str, context_id: str, change: pb.ContextChange = pb.CONTEXT_CHANGE_CHANGED
) -> None:
    """A change on an engine."""
    response = pb.WatchContextsResponse(change=change, context_id=context_id, context=Context(context_id=context_id))
    router.connections[address].streams["WatchContexts"].put_nowait(response)


async def next_of(changes: Changes) -> pb.WatchContextsResponse:
    async with asyncio.timeout(10):
        return await anext(changes)


def watches(router: FakeRouter, address: str) -> int:
    """How often an engine was asked to be watched."""
    return len(router.connections[address].requests_of("WatchContexts"))


async def test_changes_on_all_engines_say_where_they_were(watched: FakeRouter, changes: Changes) -> None:
    put(watched, "a", "x")
    put(watched, "b", "y")
    found = [await next_of(changes) for _ in range(2)]
    assert {(change.context_id, change.context.engine_id) for change in found} == {("x", "a"), ("y", "b")}


async def test_engines_are_watched_for_the_tenant_as_the_request_says_and_without_a_deadline(
    watched: FakeRouter, changes: Changes
) -> None:
    put(watched, "a", "x")
    await next_of(changes)
    for connection in watched.connections.values():
        assert connection.requests == [("WatchContexts", Caller("alice", None), REQUEST)]


async def test_a_watch_begins_anew_when_an_engine_comes(watched: FakeRouter, changes: Changes) -> None:
    put(watched, "a", "x")
    await next_of(changes)
    watched.add_engine("c")
    watched.connections["c"].streams["WatchContexts"] = asyncio.Queue()
    reset = await next_of(changes)
    assert (reset.change, reset.context_id, reset.at.seconds > 0) == (pb.CONTEXT_CHANGE_RESET, "", True)
    put(watched, "c", "z")
    assert (await next_of(changes)).context.engine_id == "c"
    assert [watches(watched, address) for address in "abc"] == [2, 2, 1]


async def test_a_watch_begins_anew_when_an_engine_is_lost(watched: FakeRouter, changes: Changes) -> None:
    put(watched, "a", "x")
    await next_of(changes)
    watched.lose("b")
    assert (await next_of(changes)).change == pb.CONTEXT_CHANGE_RESET
    put(watched, "a", "x")
    assert (await next_of(changes)).context_id == "x"
    assert [watches(watched, address) for address in "ab"] == [2, 1]


async def test_a_watch_begins_anew_when_an_engine_has_lost_changes(watched: FakeRouter, changes: Changes) -> None:
    put(watched, "a", "", pb.CONTEXT_CHANGE_RESET)
    assert (await next_of(changes)).change == pb.CONTEXT_CHANGE_RESET
    put(watched, "b", "y")
    assert (await next_of(changes)).context_id == "y"
    assert [watches(watched, address) for address in "ab"] == [2, 2]


@pytest.mark.parametrize("failure", ["ends", "fails"])
async def test_a_watch_begins_anew_when_an_engine_ends_its_own(
    watched: FakeRouter, changes: Changes, failure: str
) -> None:
    if failure == "fails":
        watched.connections["a"].errors["WatchContexts"] = [errors.ResourceExhausted("too many", reason="QUEUE_FULL")]
    else:
        watched.connections["a"].streams["WatchContexts"].put_nowait(None)
    assert (await next_of(changes)).change == pb.CONTEXT_CHANGE_RESET
    put(watched, "a", "x")
    assert (await next_of(changes)).context_id == "x"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before each new beginning, which take no time here."""
    pauses: list[float] = []

    async def pause(seconds: float, programs: Programs) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(watch_module, "RESTART_PAUSE_S", 0.1)
    monkeypatch.setattr(watch_module, "pause", pause)
    return pauses


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.Unavailable("gone", reason="ENGINE_LOST", retry_after_s=1.0), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        (
            errors.ResourceExhausted("too many calls at once", reason="QUEUE_FULL", retry_after_s=1.0),
            [1.0, 1.0, 1.0, 1.0, 1.6, 3.2, 5.0, 5.0],
        ),
        (errors.Unavailable("not now", reason="STORE_FAILED", retry_after_s=60.0), [5.0] * 8),
    ],
    ids=lambda each: each.reason if isinstance(each, errors.JaxctxError) else "",
)
async def test_a_watch_that_an_engine_refuses_begins_anew_more_and_more_seldom(
    watched: FakeRouter, changes: Changes, pauses: list[float], error: errors.JaxctxError, expected: list[float]
) -> None:
    """What the engine asks for counts as well, save where it is soon found to be lost."""
    watched.connections["a"].errors["WatchContexts"] = [error] * len(expected)
    for _ in expected:
        assert (await next_of(changes)).change == pb.CONTEXT_CHANGE_RESET
    assert pauses == pytest.approx(expected)
    put(watched, "a", "x")
    assert (await next_of(changes)).context_id == "x"
    watched.add_engine("c")
    assert (await next_of(changes)).change == pb.CONTEXT_CHANGE_RESET
    assert pauses[-1] == 0.1


async def test_an_error_for_which_waiting_does_not_help_is_raised(watched: FakeRouter, changes: Changes) -> None:
    error = errors.PermissionDenied("this method needs a key of another role")
    watched.connections["a"].errors["WatchContexts"] = [error]
    with pytest.raises(errors.PermissionDenied) as raised:
        await next_of(changes)
    assert raised.value is error


async def test_a_watch_that_waits_for_an_engine_ends_when_the_router_drains(
    watched: FakeRouter, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "RESTART_PAUSE_S", 3600.0)
    monkeypatch.setattr(watch_module, "MAX_PAUSE_S", 3600.0)
    pause, pauses = watch_module.pause, asyncio.Event()

    async def noted(*arguments: Any) -> None:
        pauses.set()
        await pause(*arguments)

    monkeypatch.setattr(watch_module, "pause", noted)
    watched.connections["a"].streams["WatchContexts"].put_nowait(None)
    waiting = asyncio.create_task(next_of(changes))
    await pauses.wait()
    watched.state.programs.draining = True
    assert (await waiting).change == pb.CONTEXT_CHANGE_RESET
    with pytest.raises(errors.Unavailable) as raised:
        await next_of(changes)
    assert raised.value.reason == "DRAINING"


async def test_an_engine_that_drains_may_end_its_watch(watched: FakeRouter, changes: Changes) -> None:
    watched.handle("a").draining = True
    watched.connections["a"].streams["WatchContexts"].put_nowait(None)
    for _ in range(3):
        put(watched, "b", "y")
        assert (await next_of(changes)).context_id == "y"
    assert watches(watched, "a") == 1


async def test_a_move_between_engines_is_no_change(watched: FakeRouter, changes: Changes) -> None:
    """The context is on "b" now: that it was closed on "a" is a step of its move."""
    watched.placements.add_unknown(ContextKey("alice", "x"), watched.handle("b"))
    put(watched, "a", "x", pb.CONTEXT_CHANGE_CLOSED)
    put(watched, "a", "y")
    assert (await next_of(changes)).context_id == "y"
    put(watched, "b", "x", pb.CONTEXT_CHANGE_CLOSED)
    assert (await next_of(changes)).change == pb.CONTEXT_CHANGE_CLOSED


async def test_a_context_that_is_remembered_on_a_lost_engine_is_no_move(watched: FakeRouter, changes: Changes) -> None:
    watched.add_engine("c")
    watched.placements.add_unknown(ContextKey("alice", "x"), watched.handle("c"))
    watched.lose("c")
    put(watched, "a", "x")
    assert (await next_of(changes)).context.engine_id == "a"


async def test_a_placement_of_another_tenant_says_nothing(watched: FakeRouter, changes: Changes) -> None:
    watched.placements.add_unknown(ContextKey("bob", "x"), watched.handle("b"))
    put(watched, "a", "x")
    assert (await next_of(changes)).context_id == "x"


async def test_a_router_that_drains_is_not_watched(watched: FakeRouter, changes: Changes) -> None:
    watched.state.programs.draining = True
    with pytest.raises(errors.Unavailable) as raised:
        await next_of(changes)
    assert raised.value.reason == "DRAINING"
    assert watches(watched, "a") == 0


async def test_a_watch_ends_when_the_router_drains(watched: FakeRouter, changes: Changes) -> None:
    put(watched, "a", "x")
    await next_of(changes)
    watched.state.programs.draining = True
    with pytest.raises(errors.Unavailable) as raised:
        await next_of(changes)
    assert raised.value.reason == "DRAINING"


async def test_a_watch_that_is_left_ends_those_of_the_engines(watched: FakeRouter) -> None:
    before = asyncio.all_tasks()
    changes = watched.watcher.watch(ALICE, REQUEST)
    put(watched, "a", "x")
    await next_of(changes)
    readers = asyncio.all_tasks() - before
    assert len(readers) == 2
    await changes.aclose()
    await asyncio.wait(readers, timeout=10)
    assert all(reader.cancelled() for reader in readers)


async def test_a_router_without_engines_can_be_watched(empty_router: FakeRouter) -> None:
    changes = empty_router.watcher.watch(ALICE, REQUEST)
    first = asyncio.create_task(next_of(changes))
    await asyncio.sleep(0.02)
    assert not first.done()
    empty_router.add_engine("a")
    assert (await first).change == pb.CONTEXT_CHANGE_RESET
    await changes.aclose()
