"""The services of a server, by its role."""

from __future__ import annotations

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.model.text import ModelText
from jaxctx.v1.context_service_pb2 import CreateContextRequest
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx.v1.session_service_pb2 import CreateSessionRequest
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Services
from jaxctx_server.validate import Limits
from tests.server.fake_engine import FakeEngine

ALICE = Caller("alice")


def services(lifecycle: ServerLifecycle, *, is_router: bool) -> Services:
    return Services.make(lifecycle, lambda: 1000.0, "secret", is_router=is_router)


async def test_a_server_of_an_engine_asks_that_engine(text: ModelText, limits: Limits) -> None:
    lifecycle, engine = ServerLifecycle(), FakeEngine()
    lifecycle.set_ready(ServingState.of(engine, text, limits))
    found = services(lifecycle, is_router=False)
    await found.contexts.create_context(ALICE, CreateContextRequest(context_id="x"))
    assert ("alice", "x") in engine.contexts
    with pytest.raises(errors.FailedPrecondition) as raised:
        await anext(found.engines.register("127.0.0.1", RegisterRequest(port=1, incarnation="i")))
    assert raised.value.reason == "WRONG_ROLE"
    lifecycle.stop()


async def test_a_router_has_sessions_and_no_contexts_without_engines(limits: Limits) -> None:
    lifecycle = ServerLifecycle()
    lifecycle.set_ready(ServingState.router(limits))
    found = services(lifecycle, is_router=True)
    await found.sessions.create_session(ALICE, CreateSessionRequest(session_id="s"))
    with pytest.raises(errors.Unavailable) as raised:
        await found.contexts.create_context(ALICE, CreateContextRequest())
    assert raised.value.reason == "ENGINE_LOST"
    lifecycle.stop()


@pytest.mark.parametrize("is_router", [False, True])
async def test_while_the_server_loads_every_service_says_so(is_router: bool) -> None:
    found = services(ServerLifecycle(), is_router=is_router)
    for call in (
        found.contexts.create_context(ALICE, CreateContextRequest()),
        found.sessions.create_session(ALICE, CreateSessionRequest()),
        anext(found.engines.register("127.0.0.1", RegisterRequest(port=1, incarnation="i"))),
    ):
        with pytest.raises(errors.Unavailable) as raised:
            await call
        assert raised.value.reason == "NOT_SERVING"
