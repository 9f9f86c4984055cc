"""Copies of contexts that moves left behind are closed, however long their engine does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import CreateContextRequest
from jaxctx_server.router import leftovers
from jaxctx_server.router.leftovers import CLOSE_TIMEOUT_S
from jaxctx_server.router.placement import ContextKey, CreatedKey
from tests.server.router.fake_router import NOW, FakeRouter

KEY = ContextKey("alice", "x")
ENGINE_LOST = errors.Unavailable("it does not answer", reason="ENGINE_LOST")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "CLOSE_AGAIN_S", (0.0, *(0.005,) * 2000))


@pytest.fixture
async def with_copy(router: FakeRouter) -> FakeRouter:
    """A router whose engine "a" has a copy of the context "x", which is on "b"."""
    await router.connections["a"].fake.create(Caller("alice"), CreateContextRequest(context_id="x"))
    router.placements.add_unknown(KEY, router.handle("b"))
    return router


def has_copy(router: FakeRouter) -> bool:
    return tuple(KEY) in router.connections["a"].fake.contexts


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_copy_is_closed_for_its_tenant_within_some_time(with_copy: FakeRouter) -> None:
    await with_copy.leftovers.close(KEY, with_copy.handle("a"))
    assert not has_copy(with_copy)
    ((_, caller, request),) = with_copy.connections["a"].requests
    assert (caller, request.context_id) == (Caller("alice", NOW + CLOSE_TIMEOUT_S), "x")
    assert not with_copy.leftovers.engine_ids(KEY)


async def test_a_copy_that_could_not_be_closed_is_closed_again_and_nobody_waits(with_copy: FakeRouter) -> None:
    with_copy.connections["a"].errors["CloseContext"] = [
        ENGINE_LOST,
        errors.Internal("a stream was reset"),
        ENGINE_LOST,
    ]
    await with_copy.leftovers.close(KEY, with_copy.handle("a"))
    assert has_copy(with_copy)
    assert set(with_copy.leftovers.engine_ids(KEY)) == {"a"}
    await until(lambda: not has_copy(with_copy))
    await until(lambda: not with_copy.leftovers.engine_ids(KEY))
    assert len(with_copy.connections["a"].requests_of("CloseContext")) == 4


@pytest.mark.parametrize(
    "error", [errors.NotFound("it is gone"), errors.PermissionDenied("not with this key")], ids=lambda each: each.code
)
async def test_an_engine_that_says_no_for_good_is_not_asked_again(
    with_copy: FakeRouter, error: errors.JaxctxError
) -> None:
    with_copy.connections["a"].errors["CloseContext"] = [error]
    await with_copy.leftovers.close(KEY, with_copy.handle("a"))
    assert not with_copy.leftovers.engine_ids(KEY)


async def test_an_engine_that_is_away_is_asked_when_it_registers_again(with_copy: FakeRouter) -> None:
    handle, connection = with_copy.handle("a"), with_copy.connections["a"]
    connection.errors["CloseContext"] = [ENGINE_LOST]
    with_copy.lose("a")
    await with_copy.leftovers.close(KEY, handle)
    await asyncio.sleep(0.05)
    assert len(connection.requests_of("CloseContext")) == 1, "nobody is there to be asked"
    with_copy.state.engines.register("a", connection, connection.encode)
    await until(lambda: not has_copy(with_copy))


async def test_a_context_that_came_to_the_engine_since_is_not_closed(with_copy: FakeRouter) -> None:
    handle = with_copy.handle("a")
    with_copy.connections["a"].errors["CloseContext"] = [ENGINE_LOST]
    await with_copy.leftovers.close(KEY, handle)
    with_copy.placements.forget(KEY)
    with_copy.placements.add_unknown(KEY, handle)
    await until(lambda: not with_copy.leftovers.engine_ids(KEY))
    assert has_copy(with_copy)


async def test_while_a_call_makes_a_context_of_this_id_none_is_closed(with_copy: FakeRouter) -> None:
    with_copy.connections["a"].errors["CloseContext"] = [ENGINE_LOST]
    lock = with_copy.placements.creation_lock(CreatedKey("alice", "GetContext", "x"))
    async with lock:
        await with_copy.leftovers.close(KEY, with_copy.handle("a"))
        await asyncio.sleep(0.05)
        assert has_copy(with_copy)
    await until(lambda: not has_copy(with_copy))


async def test_a_close_that_is_cancelled_goes_on(with_copy: FakeRouter) -> None:
    gate = with_copy.connections["a"].gates["CloseContext"] = asyncio.Event()
    closing = asyncio.create_task(with_copy.leftovers.close(KEY, with_copy.handle("a")))
    await with_copy.connections["a"].until_asked("CloseContext")
    closing.cancel()
    await asyncio.wait([closing])
    gate.set()
    await until(lambda: not has_copy(with_copy))


async def test_an_engine_that_is_gone_for_good_is_forgotten(
    with_copy: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "CLOSE_AGAIN_S", (0.0, 0.0))
    handle = with_copy.handle("a")
    with_copy.lose("a")
    with_copy.leftovers.close_later(KEY, handle)
    with_copy.leftovers.close_later(KEY, handle)  # it is the same one
    await until(lambda: not with_copy.leftovers.engine_ids(KEY))
    assert with_copy.connections["a"].requests == []
