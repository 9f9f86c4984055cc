# ruff: noqa: N802 - gRPC names the methods
"""AdminService over gRPC: load, drain, cache and adapters. Each method calls its namesake of the service layer."""

from jaxctx.v1 import admin_service_pb2 as pb
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceServicer
from jaxctx_server.grpc.caller import CallerFactory, Context
from jaxctx_server.service.interface import AdminService


class AdminServicer(AdminServiceServicer):
    """See the service in protos/jaxctx/v1/admin_service.proto."""

    def __init__(self, service: AdminService, callers: CallerFactory) -> None:
        self._service = service
        self._callers = callers

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        return await self._service.get_stats(self._callers.caller(context), request)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        return await self._service.drain(self._callers.caller(context), request)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        return await self._service.load_adapter(self._callers.caller(context), request)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        return await self._service.unload_adapter(self._callers.caller(context), request)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        return await self._service.list_adapters(self._callers.caller(context), request)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        return await self._service.clear_cache(self._callers.caller(context), request)
