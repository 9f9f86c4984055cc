"""Engines register with a router, answer there, and leave it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.model.text import ModelText
from jaxctx.types import Attention, CreateContextRequest, EngineStats
from jaxctx.v1.engine_service_pb2 import RegisterRequest, RegisterResponse
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.router import registration as registration_module
from jaxctx_server.router.migration import Migrator
from jaxctx_server.router.registration import EngineRegistration
from jaxctx_server.validate import Limits
from tests.server.fake_engine import INFO, STATS, FakeEngine
from tests.server.router.fake_router import NOW, FakeRemoteEngine, FakeRouter

REQUEST = RegisterRequest(port=7001, incarnation="first")


class ConnectedEngine(FakeRemoteEngine):
    """An engine that the registration connects to."""

    def __init__(self, text: ModelText, arguments: tuple[Any, ...]) -> None:
        super().__init__(text, INFO)
        self.arguments = arguments  # of RemoteEngine
        self.answers = True
        self.is_closed = False

    async def stats(self) -> EngineStats:
        if not self.answers:
            raise errors.Unavailable("the engine does not answer", reason="ENGINE_LOST")
        return STATS

    async def aclose(self) -> None:
        self.is_closed = True
        await super().aclose()


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, text: ModelText) -> list[ConnectedEngine]:
    """The engines that have been connected to, in their order."""
    connected: list[ConnectedEngine] = []

    def connect(*arguments: Any) -> ConnectedEngine:
        connected.append(ConnectedEngine(text, arguments))
        return connected[-1]

    monkeypatch.setattr(registration_module, "RemoteEngine", connect)
    return connected


@pytest.fixture
def registration(empty_router: FakeRouter, connected: list[ConnectedEngine]) -> EngineRegistration:
    return EngineRegistration(empty_router.lifecycle, empty_router.migrator, lambda: NOW, "secret")


def epochs(router: FakeRouter) -> dict[str, int]:
    return {address: handle.epoch for address, handle in router.state.engines.handles.items()}


async def begin(registration: EngineRegistration, host: str = "10.0.0.5") -> AsyncGenerator[RegisterResponse, None]:
    """A call of Register that has been answered."""
    call = registration.register(host, REQUEST)
    await anext(call)
    return call


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (
            Attention(implementation="reference", reason="differs", why_no_kernel="it differs in row 3"),
            (
                "WARNING",
                "engine 10.0.0.5:7001: attention is computed by plain JAX, which is slower than a kernel: it d",
            ),
        ),
        (Attention(implementation="tpu", reason="checked"), ("INFO", "engine 10.0.0.5:7001: attention tpu (checked)")),
        (None, None),
    ],
)
async def test_the_log_says_what_computes_attention_of_an_engine(
    registration: EngineRegistration,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    attention: Attention | None,
    said: tuple[str, str] | None,
) -> None:
    monkeypatch.setattr(ConnectedEngine, "attention_status", attention)
    with caplog.at_level("INFO", "jaxctx.server"):
        call = await begin(registration)
    await call.aclose()
    lines = [(each.levelname, each.message) for each in caplog.records if "attention" in each.message]
    assert len(lines) == (said is not None)
    if said is not None:
        assert lines[0][0] == said[0]
        assert lines[0][1].startswith(said[1])


async def test_an_engine_is_registered_at_the_host_that_it_calls_from(
    registration: EngineRegistration, empty_router: FakeRouter, connected: list[ConnectedEngine]
) -> None:
    call = registration.register("10.0.0.5", REQUEST)
    response = await anext(call)
    assert epochs(empty_router) == {"10.0.0.5:7001": response.epoch}
    (engine,) = connected
    silence_s = empty_router.state.engines.silence_s
    address, incarnation, key, clock, silence, credentials = engine.arguments
    assert (address, incarnation, key, clock(), silence) == ("10.0.0.5:7001", "first", "secret", NOW, silence_s)
    assert credentials is None
    await call.aclose()


async def test_each_engine_is_connected_to_with_credentials_that_may_be_renewed(
    empty_router: FakeRouter, connected: list[ConnectedEngine]
) -> None:
    def credentials() -> Any:
        return object()

    lifecycle, migrator = empty_router.lifecycle, empty_router.migrator
    registration = EngineRegistration(lifecycle, migrator, lambda: NOW, "secret", credentials)
    for host in ("10.0.0.5", "10.0.0.6"):
        await (await begin(registration, host)).aclose()
    assert [engine.arguments[-1] for engine in connected] == [credentials, credentials]


async def test_an_engine_that_calls_from_nowhere_is_on_this_machine(
    registration: EngineRegistration, empty_router: FakeRouter
) -> None:
    call = await begin(registration, host="")
    assert list(epochs(empty_router)) == ["127.0.0.1:7001"]
    await call.aclose()


async def test_an_engine_is_registered_as_long_as_its_call_goes_on(
    registration: EngineRegistration, empty_router: FakeRouter, connected: list[ConnectedEngine]
) -> None:
    call = await begin(registration)
    waiting = asyncio.ensure_future(anext(call))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert epochs(empty_router) == {}
    assert connected[0].is_closed
    assert not empty_router.engines.may_come_back()


async def test_registering_again_ends_the_registration_before(
    registration: EngineRegistration, empty_router: FakeRouter, connected: list[ConnectedEngine]
) -> None:
    first = await begin(registration)
    ended = asyncio.ensure_future(anext(first, None))
    await asyncio.sleep(0)
    second = await begin(registration)
    async with asyncio.timeout(10):
        assert await ended is None
    assert [engine.is_closed for engine in connected] == [True, False]
    assert list(epochs(empty_router).values()) == [2]
    await second.aclose()


async def test_an_engine_that_cannot_be_reached_is_not_registered(
    registration: EngineRegistration, empty_router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConnectedEngine, "stats", unavailable)
    with pytest.raises(errors.Unavailable):
        await begin(registration)
    assert epochs(empty_router) == {}


async def unavailable(_: ConnectedEngine) -> EngineStats:
    raise errors.Unavailable("the engine does not answer", reason="ENGINE_LOST")


async def test_an_engine_that_stops_answering_may_come_back_while_its_call_goes_on(
    registration: EngineRegistration,
    empty_router: FakeRouter,
    connected: list[ConnectedEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(empty_router.state.engines, "_heartbeat_s", 0.001)
    call = await begin(registration)
    before = epochs(empty_router)
    assert connected[0].times_calls_ended == 0
    connected[0].answers = False
    async with asyncio.timeout(10):
        while epochs(empty_router):
            await asyncio.sleep(0.001)
        assert empty_router.engines.may_come_back()
        assert connected[0].times_calls_ended > 0
        connected[0].answers = True
        while not epochs(empty_router):
            await asyncio.sleep(0.001)
    assert epochs(empty_router)["10.0.0.5:7001"] > before["10.0.0.5:7001"]
    await call.aclose()


async def test_an_engine_that_leaves_has_its_contexts_moved(
    registration: EngineRegistration, empty_router: FakeRouter, connected: list[ConnectedEngine]
) -> None:
    call = await begin(registration)
    empty_router.add_engine("b")
    await connected[0].fake.create(Caller(), CreateContextRequest(context_id="x"))
    leaving = RegisterRequest(port=7001, incarnation="first", leaving=True)
    async with asyncio.timeout(10):
        assert [response async for response in registration.register("10.0.0.5", leaving)] == []
    assert ("", "x") in empty_router.connections["b"].fake.contexts
    assert empty_router.handle("10.0.0.5:7001").draining
    await call.aclose()


async def test_an_engine_that_is_not_registered_may_leave(
    registration: EngineRegistration, connected: list[ConnectedEngine]
) -> None:
    leaving = RegisterRequest(port=7001, incarnation="first", leaving=True)
    assert [response async for response in registration.register("10.0.0.5", leaving)] == []
    assert connected == []


@pytest.fixture
async def engine_lifecycle(text: ModelText) -> AsyncGenerator[ServerLifecycle, None]:
    """A server that has an engine of its own."""
    lifecycle = ServerLifecycle()
    lifecycle.set_ready(ServingState.of(FakeEngine(), text, Limits.of(INFO, queue_limit=64)))
    yield lifecycle
    lifecycle.stop()


@pytest.mark.parametrize("leaving", [False, True])
async def test_a_server_that_is_no_router_registers_nobody(engine_lifecycle: ServerLifecycle, leaving: bool) -> None:
    unused: Any = Migrator
    registration = EngineRegistration(engine_lifecycle, unused, lambda: NOW, "")
    request = RegisterRequest(port=7001, incarnation="first", leaving=leaving)
    with pytest.raises(errors.FailedPrecondition) as raised:
        await anext(registration.register("10.0.0.5", request))
    assert raised.value.reason == "WRONG_ROLE"


async def test_a_router_that_loads_registers_nobody() -> None:
    unused: Any = Migrator
    registration = EngineRegistration(ServerLifecycle(), unused, lambda: NOW, "")
    with pytest.raises(errors.Unavailable) as raised:
        await anext(registration.register("10.0.0.5", REQUEST))
    assert raised.value.reason == "NOT_SERVING"
