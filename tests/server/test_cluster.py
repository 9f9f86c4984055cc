"""What servers of a cluster know each other by, and how an engine registers with its router and leaves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from jaxctx.v1 import engine_service_pb2_grpc
from jaxctx.v1.engine_service_pb2 import RegisterRequest, RegisterResponse
from jaxctx_server import cluster as cluster_module
from jaxctx_server.auth import Role
from jaxctx_server.cluster import ALONE, Cluster, leave_router, register_with_router

CLUSTER = Cluster("secret", incarnation="first")


class FakeRouter(engine_service_pb2_grpc.EngineServiceServicer):
    """A router that answers Register as a test says."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[RegisterRequest] = []
        self.authorizations: list[Any] = []
        self.timeouts: list[float | None] = []
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.stays = asyncio.Event()  # a registration ends when it is set

    async def Register(self, request: RegisterRequest, context: Any) -> AsyncIterator[RegisterResponse]:  # noqa: N802
        self.requests.append(request)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        self.timeouts.append(context.time_remaining())
        if self.error is not None:
            await context.abort(*self.error)
        if not request.leaving:
            yield RegisterResponse(epoch=len(self.requests))
        await self.stays.wait()


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeRouter]:
    monkeypatch.setattr(cluster_module, "RETRY_S", 0.01)
    router, server = FakeRouter(), grpc.aio.server()
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield router
    router.stays.set()
    await server.stop(None)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="jaxctx.server")
    return caplog


async def until_requested(router: FakeRouter, times: int) -> None:
    async with asyncio.timeout(30):
        while len(router.requests) < times:
            await asyncio.sleep(0.005)


def test_the_secret_is_a_key_of_the_clusters_role() -> None:
    accepted = CLUSTER.accepted
    assert (accepted.role, accepted.tenant) == (Role.CLUSTER, "")
    assert accepted == Cluster("secret").accepted
    assert accepted != Cluster("another").accepted
    assert "secret" not in repr(accepted)


def test_each_process_is_an_incarnation_of_its_own() -> None:
    assert Cluster().incarnation != Cluster().incarnation
    assert len(Cluster().incarnation) == 32
    assert ALONE.key == ""


async def test_an_engine_registers_with_its_port_and_the_clusters_key(
    router: FakeRouter, log: pytest.LogCaptureFixture
) -> None:
    registering = asyncio.create_task(register_with_router(router.address, CLUSTER, 7001))
    async with asyncio.timeout(30):
        while "epoch 1" not in log.text:
            await asyncio.sleep(0.005)
    registering.cancel()
    assert router.requests == [RegisterRequest(port=7001, incarnation="first")]
    assert (router.authorizations, router.timeouts) == (["Bearer secret"], [None])
    assert f"registered with the router at {router.address}" in log.text


async def test_without_a_secret_no_key_is_sent(router: FakeRouter) -> None:
    registering = asyncio.create_task(register_with_router(router.address, Cluster(), 7001))
    await until_requested(router, 1)
    registering.cancel()
    assert router.authorizations == [None]


async def test_an_engine_whose_registration_ends_registers_again(router: FakeRouter) -> None:
    router.stays.set()
    registering = asyncio.create_task(register_with_router(router.address, CLUSTER, 7001))
    await until_requested(router, 3)
    assert not registering.done()
    registering.cancel()


async def test_an_error_is_logged_once_until_the_engine_has_been_registered(
    router: FakeRouter, log: pytest.LogCaptureFixture
) -> None:
    router.error = (grpc.StatusCode.UNAUTHENTICATED, "wrong key")
    registering = asyncio.create_task(register_with_router(router.address, CLUSTER, 7001))
    await until_requested(router, 4)
    assert log.text.count("wrong key") == 1
    router.error = (grpc.StatusCode.PERMISSION_DENIED, "not that one")
    await until_requested(router, 8)
    assert log.text.count("not that one") == 1
    router.error = None
    router.stays.set()
    async with asyncio.timeout(30):
        while "registered with" not in log.text:
            await asyncio.sleep(0.005)
    router.error = (grpc.StatusCode.PERMISSION_DENIED, "not that one")
    async with asyncio.timeout(30):
        while log.text.count("not that one") < 2:
            await asyncio.sleep(0.005)
    assert not registering.done()
    registering.cancel()


async def test_an_engine_that_leaves_waits_until_its_contexts_have_moved(router: FakeRouter) -> None:
    leaving = asyncio.create_task(leave_router(router.address, CLUSTER, 7001, 60.0))
    await until_requested(router, 1)
    assert not leaving.done()
    assert router.requests == [RegisterRequest(port=7001, incarnation="first", leaving=True)]
    (timeout_s,) = router.timeouts
    assert timeout_s is not None
    assert 50.0 < timeout_s < 61.0  # gRPC rounds what is left of 60 s
    router.stays.set()
    async with asyncio.timeout(30):
        await leaving
    assert len(router.requests) == 1


async def test_an_engine_leaves_though_the_router_takes_too_long_or_refuses(
    router: FakeRouter, log: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(30):
        await leave_router(router.address, CLUSTER, 7001, 0.05)
    router.error = (grpc.StatusCode.UNAUTHENTICATED, "wrong key")
    async with asyncio.timeout(30):
        await leave_router(router.address, CLUSTER, 7001, 60.0)
    assert log.text.count("not with the router at") == 2
