"""AdminService on an engine and on a router: load, drain and cache."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import RemoteEngine
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.types import CreateContextRequest, EngineStats, GenerateRequest
from jaxctx.v1 import admin_service_pb2 as pb
from jaxctx_server.cluster import ALONE
from jaxctx_server.lifecycle import ServerLifecycle, State
from jaxctx_server.service.admin import LocalAdminService
from tests.server.fake_engine import STATS, FakeEngine

OPERATOR = Caller("ops")


async def encode(text: str, start: bool) -> list[int]:
    return []


def register(lifecycle: ServerLifecycle, address: str) -> tuple[EngineHandle, FakeEngine]:
    """Register an engine with a router."""
    engine: Any = FakeEngine()
    return lifecycle.served().engines.register(address, engine, encode), engine


async def until_registered(lifecycle: ServerLifecycle) -> None:
    async with asyncio.timeout(10):
        while not lifecycle.served().engine_handles():
            await asyncio.sleep(0)


async def test_the_load_of_this_server_is_that_of_its_engine_now(lifecycle: ServerLifecycle) -> None:
    (found,) = (await LocalAdminService(lifecycle).get_stats(OPERATOR, pb.GetStatsRequest())).engines
    assert (found.info.model_id, found.stats.pages_free, found.address, found.epoch) == ("fake", 90, "", 0)


async def test_the_load_of_a_router_is_that_of_the_engines_that_have_reported_it(
    router_lifecycle: ServerLifecycle,
) -> None:
    first, _ = register(router_lifecycle, "10.0.0.1:1")
    register(router_lifecycle, "10.0.0.2:1")
    first.update_load(replace(STATS, pages_free=42))
    (found,) = (await LocalAdminService(router_lifecycle).get_stats(OPERATOR, pb.GetStatsRequest())).engines
    assert (found.address, found.epoch, found.stats.pages_free) == ("10.0.0.1:1", first.epoch, 42)


async def test_a_router_without_engines_has_no_load(router_lifecycle: ServerLifecycle) -> None:
    response = await LocalAdminService(router_lifecycle).get_stats(OPERATOR, pb.GetStatsRequest())
    assert response == pb.GetStatsResponse()


async def test_a_drain_returns_when_running_work_is_done(lifecycle: ServerLifecycle, engine: FakeEngine) -> None:
    engine.drained.clear()
    draining = asyncio.create_task(LocalAdminService(lifecycle).drain(OPERATOR, pb.DrainRequest()))
    async with asyncio.timeout(10):
        while not engine.draining:
            await asyncio.sleep(0)
    assert lifecycle.state is State.DRAINING
    assert not draining.done()
    engine.drained.set()
    assert await draining == pb.DrainResponse()


async def test_the_cache_is_cleared_for_all_tenants(lifecycle: ServerLifecycle, engine: FakeEngine) -> None:
    await until_registered(lifecycle)
    response = await LocalAdminService(lifecycle).clear_cache(OPERATOR, pb.ClearCacheRequest())
    assert response.pages_dropped == 9
    assert [(name, caller) for name, caller, _ in engine.calls] == [("clear_cache", Caller())]


async def test_a_router_clears_the_caches_of_all_engines(router_lifecycle: ServerLifecycle) -> None:
    engines = [register(router_lifecycle, address)[1] for address in ("a", "b")]
    response = await LocalAdminService(router_lifecycle).clear_cache(OPERATOR, pb.ClearCacheRequest())
    assert response.pages_dropped == 18
    assert [len(engine.calls) for engine in engines] == [1, 1]


async def test_an_error_of_an_engine_is_raised(router_lifecycle: ServerLifecycle) -> None:
    _, engine = register(router_lifecycle, "a")
    engine.error = errors.Unavailable("it is gone", reason="ENGINE_LOST")
    with pytest.raises(errors.Unavailable):
        await LocalAdminService(router_lifecycle).clear_cache(OPERATOR, pb.ClearCacheRequest())


async def test_a_router_whose_caller_leaves_while_engines_tell_their_adapters_cuts_no_other_call(
    router_lifecycle: ServerLifecycle, open_grpc_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        open_grpc_server() as grpc_server,
        aclosing(RemoteEngine(grpc_server.target, ALONE.incarnation, "", lambda: 1000.0, silence_s=60.0)) as remote,
    ):
        await remote.stats()
        router_lifecycle.served().engines.register("a", remote, remote.encode)
        grpc_server.engine.hang = True
        await remote.create(Caller(), CreateContextRequest(context_id="x"))
        output = remote.generate(Caller(), GenerateRequest(context_id="x"))
        await anext(output)
        asked, never = asyncio.Event(), asyncio.Event()
        ask_for_stats = remote.stats

        async def noted_stats() -> EngineStats:
            asked.set()
            return await ask_for_stats()

        monkeypatch.setattr(remote, "stats", noted_stats)
        monkeypatch.setattr(grpc_server.engine, "stats", never.wait)
        request = pb.UnloadAdapterRequest(name="none")
        unloading = asyncio.create_task(LocalAdminService(router_lifecycle).unload_adapter(OPERATOR, request))
        async with asyncio.timeout(30):
            await asked.wait()
            unloading.cancel()
            await asyncio.wait([unloading])
            going_on = asyncio.create_task(anext(output))
            await asyncio.wait([going_on], timeout=0.2)
            assert not going_on.done()
        going_on.cancel()
        await asyncio.wait([going_on])


async def test_while_the_server_loads_it_says_so() -> None:
    service = LocalAdminService(ServerLifecycle())
    for call in (
        service.get_stats(OPERATOR, pb.GetStatsRequest()),
        service.drain(OPERATOR, pb.DrainRequest()),
        service.clear_cache(OPERATOR, pb.ClearCacheRequest()),
    ):
        with pytest.raises(errors.Unavailable) as raised:
            await call
        assert raised.value.reason == "NOT_SERVING"
