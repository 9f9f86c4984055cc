"""The engines of a router: their order, which of them may come back, and RPCs to each."""

from __future__ import annotations

import asyncio

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import CreateContextRequest
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import Context
from jaxctx_server.router.engines import set_engine_id
from tests.server.router.fake_router import FakeRouter


async def test_engines_by_load_first_the_known_one_and_last_those_that_drain(router: FakeRouter) -> None:
    a, b, c = router.handle("a"), router.handle("b"), router.add_engine("c")
    a.forwarded, b.forwarded = 2, 1
    assert router.engines.by_load() == [c, b, a]
    assert router.engines.by_load(first=a) == [a, c, b]
    c.draining = True
    assert router.engines.by_load() == [b, a, c]
    assert router.engines.by_load(first=c) == [c, b, a]
    router.lose("a")
    assert router.engines.by_load(first=a) == [b, c]


async def test_only_engines_of_the_model(router: FakeRouter) -> None:
    other = router.add_engine("c", model_id="other")
    assert router.engines.by_load("other") == [other]
    assert router.engines.by_load("") == [router.handle("a"), router.handle("b")]
    assert len(router.engines.by_load(None)) == 3
    with pytest.raises(errors.NotFound) as raised:
        router.engines.by_load("none")
    assert raised.value.reason == "MODEL_NOT_FOUND"
    router.lose("c")
    assert router.engines.by_load("other") == [], "the model is known, but no engine serves it now"


async def test_before_any_engine_has_come_no_model_is_known(empty_router: FakeRouter) -> None:
    with pytest.raises(errors.Unavailable) as raised:
        empty_router.engines.by_load("")
    assert raised.value.reason == "ENGINE_LOST"
    assert empty_router.engines.by_load() == []


async def test_a_registration_that_has_ended_is_known_as_such(router: FakeRouter) -> None:
    before = router.handle("a")
    assert router.engines.is_registered(before)
    again = router.add_engine("a")
    assert router.engines.is_registered(again)
    assert not router.engines.is_registered(before)


async def test_an_engine_may_come_back_while_it_is_watched(router: FakeRouter) -> None:
    assert not router.engines.may_come_back()
    router.lose("a")
    assert not router.engines.may_come_back()
    router.lose("b", may_come_back=True)
    assert router.engines.may_come_back()
    router.watch.cancel()
    await asyncio.wait([router.watch])
    assert not router.engines.may_come_back()


async def test_the_error_without_engines_says_whether_any_has_come(empty_router: FakeRouter) -> None:
    assert empty_router.engines.no_engine_error().message == "no engine has come yet"
    empty_router.add_engine("a")
    assert empty_router.engines.no_engine_error().message == "the engine does not answer"
    empty_router.lose("a")
    error = empty_router.engines.no_engine_error()
    assert (error.message, error.reason) == ("no engine is there now", "ENGINE_LOST")


async def test_each_engine_is_asked_and_ignored_errors_are_left_out(router: FakeRouter) -> None:
    request = pb.GetContextRequest(context_id="x")
    await router.connections["b"].fake.create(Caller("alice"), CreateContextRequest(context_id="x"))
    handles = router.engines.handles()
    responses = await router.engines.ask_each(
        lambda engine: engine.contexts.GetContext, Caller("alice"), request, handles, ignore=errors.NotFound
    )
    assert list(responses) == [router.handle("b")]
    assert responses[router.handle("b")].context.context_id == "x"
    assert [caller.tenant for _, caller, _ in router.connections["a"].requests] == ["alice"]


async def test_an_error_that_is_not_ignored_is_raised(router: FakeRouter) -> None:
    router.connections["b"].errors["GetContext"] = [errors.Unavailable("it drains", reason="DRAINING")]
    with pytest.raises(errors.Unavailable):
        await router.engines.ask_each(
            lambda engine: engine.contexts.GetContext,
            Caller(),
            pb.GetContextRequest(context_id="x"),
            router.engines.handles(),
            ignore=errors.NotFound,
        )


async def test_the_engine_id_is_set_only_where_there_is_a_context(router: FakeRouter) -> None:
    contexts = [Context(context_id="x", engine_id="local"), Context()]
    set_engine_id(contexts, router.handle("a"))
    assert [context.engine_id for context in contexts] == ["a", ""]
