"""Tenants of a router, on its engines."""

from __future__ import annotations

import asyncio

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import ContextInfo
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from tests.e2e.program_callers import SYSTEM, output_of
from tests.e2e.router_cluster import (
    RouterCluster,
    WithKeys,
    address_of,
    error_of,
    program_caller,
)


async def contexts_of_programs(router_cluster: RouterCluster, tenant: str) -> list[ContextInfo]:
    """A tenant's contexts on all engines, those of programs included."""
    lists = [await each.list(Caller(tenant), include_program_contexts=True) for each in router_cluster.engines.values()]
    return [info for one in lists for info in one]


class TestPrograms(WithKeys):
    async def test_a_program_is_its_tenants_on_the_engine(self, router_cluster: RouterCluster) -> None:
        async with program_caller(router_cluster, "alice") as caller:
            assert await caller.get((await caller.call(SYSTEM + "{{o}}", o=output_of()))["o"])
        async with asyncio.timeout(120):
            left = await contexts_of_programs(router_cluster, "alice")
            while len(left) > 1:  # the call's own is given back in the background
                await asyncio.sleep(0.01)
                left = await contexts_of_programs(router_cluster, "alice")
        assert [each.labels for each in left] == [{"jaxctx": "program"}]
        for engine in router_cluster.engines.values():
            assert not await engine.list(Caller("bob"), include_program_contexts=True)
            assert not await engine.list(Caller(""), include_program_contexts=True)


class TestContexts(WithKeys):
    async def test_tenants_travel(self, router_cluster: RouterCluster) -> None:
        async with (
            jaxctx.aio.Client(router_cluster.router, api_key="alice", timeout_s=10) as alice,
            jaxctx.aio.Client(router_cluster.router, api_key="bob", timeout_s=10) as bob,
        ):
            for client in (alice, bob):
                await client.create("Hello", context_id="mine")
            assert await address_of(router_cluster, "mine", "alice")
            await alice.create(context_id="hers")
            with pytest.raises(errors.NotFound):
                await bob.context("hers")
            assert [each.id async for each in bob.contexts()] == ["mine"]
            with pytest.raises(errors.PermissionDenied):
                await bob.clear_cache()
        async with grpc.aio.insecure_channel(router_cluster.router) as channel:
            error = await error_of(ContextServiceStub(channel).ListContexts(pb.ListContextsRequest()))
            assert isinstance(error, errors.Unauthenticated)
