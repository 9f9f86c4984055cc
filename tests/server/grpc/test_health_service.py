"""grpc.health.v1 from loading to drained."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxctx import errors
from jaxctx.v1 import (
    admin_service_pb2,
)
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.server import SERVICES
from tests.server.harness import failure

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_from_loading_to_drained(open_grpc_server: Any) -> None:
    async with open_grpc_server(ready=False) as grpc_server:
        health = health_pb2_grpc.HealthStub(grpc_server.channel)

        async def check(service: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        unread = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))  # holds nobody up
        assert (await watch.read()).status == NOT_SERVING
        assert await check("") == SERVING
        assert [await check(service) for service in SERVICES] == [NOT_SERVING] * len(SERVICES)
        error = await failure(grpc_server.contexts.ListContexts(pb.ListContextsRequest()))
        assert (type(error), error.reason, error.retry_after_s) == (errors.Unavailable, "NOT_SERVING", 1.0)
        error = await failure(grpc_server.admin.Drain(admin_service_pb2.DrainRequest()))
        assert isinstance(error, errors.Unavailable)

        grpc_server.lifecycle.set_ready(grpc_server.state)
        assert (await watch.read()).status == SERVING
        assert [await check(service) for service in SERVICES] == [SERVING] * len(SERVICES)

        grpc_server.engine.drained.clear()  # there is running work
        drain = grpc_server.admin.Drain(admin_service_pb2.DrainRequest())
        waiting = asyncio.ensure_future(drain)
        assert (await watch.read()).status == NOT_SERVING
        assert grpc_server.engine.draining
        assert await check(SERVICES[0]) == NOT_SERVING
        assert await check("") == SERVING
        assert not waiting.done()
        drain.cancel()  # it goes on all the same
        again = asyncio.ensure_future(grpc_server.admin.Drain(admin_service_pb2.DrainRequest()))
        await asyncio.sleep(0.05)
        assert not again.done()
        grpc_server.engine.drained.set()
        await again
        grpc_server.lifecycle.stop()
        assert await watch.read() is grpc.aio.EOF
        unread.cancel()


async def test_health_of_unknown_services(grpc_server: Any) -> None:
    health = health_pb2_grpc.HealthStub(grpc_server.channel)
    assert isinstance(await failure(health.Check(health_pb2.HealthCheckRequest(service="x"))), errors.NotFound)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="x"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
