# ruff: noqa: N802 - gRPC names the methods
"""grpc.health.v1: "" says that the process is alive, a service's name that it takes work.

Not the servicer of grpcio-health-checking: its watchers hold a lock while they write, so that one that does not read
would hold up a drain, and one that leaves makes others miss changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxctx.errors import NotFound
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.serving import Serving, State

Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Says what `Serving` says."""

    def __init__(self, serving: Serving, services: Collection[str]) -> None:
        self._serving = serving
        self._services = services

    async def Check(self, request: Any, context: Context) -> Any:
        """The status of a service now; NOT_FOUND for a name that is none."""
        if request.service and request.service not in self._services:
            raise NotFound("there is no such service", reason="SERVICE_NOT_FOUND")
        return Response(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """The status of a service now and whenever it changes, until the server stops."""
        sent = None
        while self._serving.state is not State.STOPPED:
            change = self._serving.change
            status = self._status(request.service)
            if status != sent:
                yield Response(status=status)
                sent = status
            await change.wait()

    def _status(self, service: str) -> int:
        if service == "":
            return int(Response.SERVING)
        if service not in self._services:
            return int(Response.SERVICE_UNKNOWN)
        return int(Response.SERVING if self._serving.state is State.READY else Response.NOT_SERVING)
