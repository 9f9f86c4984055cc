"""Tenants of a router, on its engines."""

from __future__ import annotations

import asyncio

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx_server.auth import Key
from jaxctx_server.cluster import Cluster
from tests.e2e.program_callers import SYSTEM, output_of
from tests.e2e.router_cluster import (
    CLUSTER_KEY,
    USERS,
    RouterCluster,
    address_of,
    error_of,
    program_caller,
)


class TestPrograms:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return USERS

    @pytest.fixture
    def cluster(self) -> Cluster:
        return Cluster(CLUSTER_KEY)

    async def test_a_program_is_its_tenants_on_the_engine(self, router_cluster: RouterCluster) -> None:
        async with program_caller(router_cluster, "alice") as caller:
            assert await caller.get((await caller.call(SYSTEM + "{{o}}", o=output_of()))["o"])
        async with asyncio.timeout(120):
            while (
                len(
                    left := [
                        one
                        for each in router_cluster.engines.values()
                        for one in await each.list(Caller("alice"), include_program_contexts=True)
                    ]
                )
                > 1
            ):
                await asyncio.sleep(0.01)  # the call's own is given back in the background
        assert [each.labels for each in left] == [{"jaxctx": "program"}]
        for engine in router_cluster.engines.values():
            assert not await engine.list(Caller("bob"), include_program_contexts=True)
            assert not await engine.list(Caller(""), include_program_contexts=True)


class TestContexts:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return USERS

    @pytest.fixture
    def cluster(self) -> Cluster:
        return Cluster(CLUSTER_KEY)

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
