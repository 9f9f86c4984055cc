# ruff: noqa: N802 - gRPC names the methods
"""grpc.health.v1: the health of "" says that the process runs, that of a service that it accepts work.

It is not the servicer of grpcio-health-checking: its watchers hold a lock while they write, so that one that does not
read would hold up a drain, and one that leaves makes others miss changes.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxctx.errors import NotFound
from jaxctx_server.grpc.caller import Context
from jaxctx_server.lifecycle import ServerLifecycle, State

Health = health_pb2.HealthCheckResponse
POLL_S = 1.0  # how often a watch looks whether a router has engines


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers by the state of the `ServerLifecycle`."""

    def __init__(
        self, lifecycle: ServerLifecycle, services: Collection[str], services_of_engines: Collection[str]
    ) -> None:
        """`services` are the full names of all services, `services_of_engines` of those that a router has its engines
        answer, and that are healthy there only while it has one.
        """
        self._lifecycle = lifecycle
        self._services = services
        self._services_of_engines = services_of_engines

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        """The status of a service now; NOT_FOUND for an unknown name."""
        if request.service and request.service not in self._services:
            raise NotFound("there is no such service", reason="SERVICE_NOT_FOUND")
        return Health(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> AsyncIterator[Any]:
        """The status of a service now and whenever it changes, until the server stops."""
        sent = None
        while self._lifecycle.state is not State.STOPPED:
            changed = self._lifecycle.changed
            status = self._status(request.service)
            if status != sent:
                yield Health(status=status)
                sent = status
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await changed.wait()

    def _status(self, service: str) -> int:
        if service and service not in self._services:
            return int(Health.SERVICE_UNKNOWN)
        return int(Health.SERVING if self._takes_work(service) else Health.NOT_SERVING)

    def _takes_work(self, service: str) -> bool:
        if service == "":
            return True
        if self._lifecycle.state is not State.READY:
            return False
        if service not in self._services_of_engines:
            return True
        state = self._lifecycle.served()
        return state.model is not None or bool(state.engine_handles())
