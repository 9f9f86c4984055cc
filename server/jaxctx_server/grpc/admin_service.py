# ruff: noqa: N802 - gRPC names the methods
"""AdminService: load, drain, cache."""

from __future__ import annotations

from jaxctx.v1 import admin_service_pb2 as pb
from jaxctx.v1 import admin_service_pb2_grpc
from jaxctx_server.grpc import encode
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.serving import Serving


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    """See the service in protos/jaxctx/v1/admin_service.proto."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        engine = self._serving.served().engine
        return pb.GetStatsResponse(engines=[encode.engine(engine.info, await engine.stats())])

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        await self._serving.drain()
        return pb.DrainResponse()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        return pb.ClearCacheResponse(pages_dropped=await self._serving.served().engine.clear_cache())
