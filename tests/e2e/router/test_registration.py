"""Engines register with a router: which may, and what a router knows of them."""

from __future__ import annotations

import asyncio

import grpc

import jaxctx
from jaxctx import errors
from jaxctx import types as requests
from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import INCARNATION_HEADER, TENANT_HEADER, authorization_metadata
from jaxctx.v1 import context_service_pb2
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx.v1.engine_service_pb2_grpc import EngineServiceStub
from jaxctx_server.cluster import ALONE
from tests.e2e.program_callers import output_of
from tests.e2e.router_cluster import (
    CLUSTER_KEY,
    RouterCluster,
    WithKeys,
    error_of,
    program_caller,
    register_engine,
    router_of,
    wait_until,
)
from tests.engines import Clock


async def test_the_router_tells_of_its_engines(router_cluster: RouterCluster) -> None:
    async with jaxctx.aio.Client(router_cluster.router, timeout_s=10) as client:
        await wait_until(lambda: all(node.stats for node in router_cluster.handles.values()))
        told = await client.engines()
        assert [(each.address, each.epoch) for each in told] == [
            (a, n) for n, a in enumerate(router_cluster.engines, 1)
        ]
        first = next(iter(router_cluster.engines.values()))
        assert told[0].info == first.info
        assert told[0].attention == first.attention.as_status()
        assert told[0].attention.reason == "platform"


async def test_a_new_router_finds_its_engines_again(router_cluster: RouterCluster, clock: Clock) -> None:
    port = int(router_cluster.router.rpartition(":")[2])
    router_cluster.lifecycle.stop()
    await router_cluster.server.stop(None)
    again = RouterCluster(clock, None, ALONE)
    async with router_of(again, port):
        await wait_until(lambda: again.handles.keys() == router_cluster.engines.keys())
        async with program_caller(again) as caller:
            assert await caller.get((await caller.call("Say {{o}}", o=output_of()))["o"])


async def test_registering_again_ends_the_call_before(router_cluster: RouterCluster) -> None:
    """As after a connection whose end was not noticed; and a router that stops ends all."""
    address = next(iter(router_cluster.engines))
    port, node = int(address.rpartition(":")[2]), router_cluster.handles[address]
    incarnation = node.engine._headers[-1][1]
    router_cluster.leave(address)
    await wait_until(lambda: address not in router_cluster.handles)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        calls = []
        for _ in range(2):
            calls.append(EngineServiceStub(channel).Register(RegisterRequest(port=port, incarnation=incarnation)))
            assert (await calls[-1].read()).epoch == router_cluster.handles[address].epoch
        assert await asyncio.wait_for(calls[0].read(), 5) is grpc.aio.EOF
        assert address in router_cluster.handles
        router_cluster.lifecycle.stop()
        assert await asyncio.wait_for(calls[1].read(), 5) is grpc.aio.EOF
        assert address not in router_cluster.handles


async def test_an_engine_that_does_not_answer_cannot_register(router_cluster: RouterCluster) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        error = await error_of(register_engine(channel, port=silent.sockets[0].getsockname()[1]))
        assert error.code in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
    silent.close()


async def test_who_may_register(router_cluster: RouterCluster) -> None:
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        error = await error_of(register_engine(channel, port=1))
        assert error.code == "UNAVAILABLE"
        for fields, name in (({"port": 0}, "port"), ({"port": 70000}, "port"), ({"incarnation": ""}, "incarnation")):
            error = await error_of(register_engine(channel, **fields))
            assert [each.field for each in error.violations] == [name]
    async with grpc.aio.insecure_channel(next(iter(router_cluster.engines))) as channel:
        assert (await error_of(register_engine(channel))).reason == "WRONG_ROLE"


class TestKeys(WithKeys):
    async def test_registering_needs_the_clusters_key(self, router_cluster: RouterCluster) -> None:
        async with grpc.aio.insecure_channel(router_cluster.router) as channel:
            assert isinstance(await error_of(register_engine(channel)), errors.Unauthenticated)
            assert isinstance(await error_of(register_engine(channel, "alice")), errors.PermissionDenied)

    async def test_only_the_cluster_key_may_name_tenant_and_incarnation(self, router_cluster: RouterCluster) -> None:
        address, engine = next(iter(router_cluster.engines.items()))
        await engine.create(Caller("bob"), requests.CreateContextRequest(context_id="bobs"))
        wanted = context_service_pb2.GetContextRequest(context_id="bobs")
        async with grpc.aio.insecure_channel(address) as channel:
            get = ContextServiceStub(channel).GetContext
            assert isinstance(
                await error_of(get(wanted, metadata=(*authorization_metadata("alice"), (TENANT_HEADER, "bob")))),
                errors.NotFound,
            )
            assert (
                await get(wanted, metadata=(*authorization_metadata(CLUSTER_KEY), (TENANT_HEADER, "bob")))
            ).context.context_id == "bobs"
            error = await error_of(
                get(
                    wanted,
                    metadata=(
                        *authorization_metadata(CLUSTER_KEY),
                        (TENANT_HEADER, "bob"),
                        (INCARNATION_HEADER, "another"),
                    ),
                )
            )
            assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_LOST")
        await engine.close(Caller("bob"), "bobs")
