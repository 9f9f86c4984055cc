# ruff: noqa: N802 - gRPC names the methods
"""AdminService over gRPC: load, drain and cache. Each method calls the one of the service layer that has its name."""

from jaxctx.v1 import admin_service_pb2 as pb
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceServicer
from jaxctx_server.grpc.caller import CallerFactory, Context
from jaxctx_server.service.interface import AdminService


class AdminServicer(AdminServiceServicer):
    """See the service in protos/jaxctx/v1/admin_service.proto."""

<<<<<<< HEAD
    def __init__(self, service: AdminService, callers: CallerFactory) -> None:
        self._service = service
        self._callers = callers

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        return await self._service.get_stats(self._callers.caller(context), request)
=======
    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> Any:
        served = self._serving.served()
        if served.model is not None:
            engine = served.model.engine
            engines = [EngineStatus(info=engine.info, stats=await engine.stats())]
        else:
            nodes = served.programs.dispatcher.engines.handles.values()
            known = [(node, node.stats) for node in nodes if node.stats is not None]
            engines = [
                EngineStatus(info=each.engine.info, stats=at, address=each.id, epoch=each.epoch) for each, at in known
            ]
        return told("GetStats", engines)
>>>>>>> main

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        return await self._service.drain(self._callers.caller(context), request)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
<<<<<<< HEAD
        return await self._service.clear_cache(self._callers.caller(context), request)
=======
        nodes = self._serving.served().programs.dispatcher.engines.handles.values()
        dropped = await asyncio.gather(*(node.engine.clear_cache(Caller()) for node in nodes))
        return pb.ClearCacheResponse(pages_dropped=sum(dropped))


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Says what `ServerLifecycle` says."""

    def __init__(self, serving: ServerLifecycle, services: Collection[str]) -> None:
        self._serving = serving
        self._services = services

    async def Check(self, request: Any, context: Context) -> Any:
        """The status of a service now; NOT_FOUND for a name that is none."""
        if request.service and request.service not in self._services:
            raise NotFound("there is no such service", reason="SERVICE_NOT_FOUND")
        return Health(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """The status of a service now and whenever it changes, until the server stops."""
        sent = None
        while self._serving.state is not State.STOPPED:
            change = self._serving.change
            status = self._status(request.service)
            if status != sent:
                yield Health(status=status)
                sent = status
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await change.wait()

    def _status(self, service: str) -> int:
        if service and service not in self._services:
            return int(Health.SERVICE_UNKNOWN)
        serving = service == "" or self._serving.state is State.READY
        if serving and service.rpartition(".")[2] in ROUTED:  # a router needs others for them
            served = self._serving.served()
            serving = served.model is not None or bool(served.programs.dispatcher.engines.handles)
        return int(Health.SERVING if serving else Health.NOT_SERVING)
>>>>>>> main
