"""AdminService: load, drain and cache of this server, and of its engines if it is a router."""

import asyncio

from jaxctx import convert
from jaxctx.engine.interface import Caller
from jaxctx.types import EngineStatus
from jaxctx.v1 import admin_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle


class LocalAdminService:
    """Implements `jaxctx_server.service.interface.AdminService`."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    async def get_stats(self, caller: Caller, request: pb.GetStatsRequest) -> pb.GetStatsResponse:
        state = self._lifecycle.served()
        if state.model is not None:
            engine = state.model.engine
            statuses = [EngineStatus(info=engine.info, stats=await engine.stats(), attention=engine.attention_status)]
        else:
            statuses = [
                EngineStatus(
                    info=handle.engine.info,
                    stats=handle.stats,
                    address=handle.id,
                    epoch=handle.epoch,
                    attention=handle.engine.attention_status,
                )
                for handle in state.engine_handles()
                if handle.stats is not None
            ]
        return pb.GetStatsResponse(engines=[convert.engine_status_to_proto(status) for status in statuses])

    async def drain(self, caller: Caller, request: pb.DrainRequest) -> pb.DrainResponse:
        await self._lifecycle.drain()
        return pb.DrainResponse()

    async def clear_cache(self, caller: Caller, request: pb.ClearCacheRequest) -> pb.ClearCacheResponse:
        handles = self._lifecycle.served().engine_handles()
        pages_dropped = await asyncio.gather(*(handle.engine.clear_cache(Caller()) for handle in handles))
        return pb.ClearCacheResponse(pages_dropped=sum(pages_dropped))
