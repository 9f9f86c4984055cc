"""Health of a router's services."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.router_cluster import (
    RouterCluster,
    wait_until,
)


async def test_health(router_cluster: RouterCluster) -> None:
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def serving(service: str) -> bool:
            told = await stub.Check(health_pb2.HealthCheckRequest(service=f"jaxctx.v1.{service}"))
            return bool(told.status == health_pb2.HealthCheckResponse.SERVING)

        watch = stub.Watch(health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await serving("ContextService")
        for address in router_cluster.engines:
            router_cluster.leave(address)
        await wait_until(lambda: not router_cluster.handles)
        for service in ("ContextService", "SnapshotService", "ModelService"):
            assert not await serving(service)
        assert await serving("SessionService")
        assert await serving("AdminService")
        told = await asyncio.wait_for(watch.read(), 5)
        assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
