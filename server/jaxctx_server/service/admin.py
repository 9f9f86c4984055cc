"""AdminService: load, drain, cache and adapters of this server, and of its engines if it is a router."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from jaxctx import convert
from jaxctx.engine.interface import Caller
from jaxctx.errors import NotFound
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.types import AdapterInfo, EngineStatus
from jaxctx.v1 import admin_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle

T = TypeVar("T")


class LocalAdminService:
    """Implements `jaxctx_server.service.interface.AdminService`."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    async def get_stats(self, caller: Caller, request: pb.GetStatsRequest) -> pb.GetStatsResponse:
        state = self._lifecycle.served()
        if state.model is not None:
            engine = state.model.engine
            status = EngineStatus(
                info=engine.info,
                stats=await engine.stats(),
                attention=engine.attention_status,
                adapters=engine.adapter_revisions,
            )
            statuses = [status]
        else:
            statuses = [
                EngineStatus(
                    info=handle.engine.info,
                    stats=handle.stats,
                    address=handle.id,
                    epoch=handle.epoch,
                    adapters=handle.engine.adapter_revisions,
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

    async def load_adapter(self, caller: Caller, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        directory = request.directory or request.name

        async def load(handle: EngineHandle) -> AdapterInfo:
            return await handle.engine.load_adapter(caller, request.name, directory)

        state = self._lifecycle.served()
        model_id, _ = state.engines.find_model(request.model_id)
        infos = await self._on_each(
            load, [each for each in state.engine_handles() if each.engine.info.model_id == model_id]
        )
        return pb.LoadAdapterResponse(adapter=convert.adapter_to_proto(merge_adapters(infos)[0]))

    async def unload_adapter(self, caller: Caller, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        async def unload(handle: EngineHandle) -> AdapterInfo | None:
            try:
                return await handle.engine.unload_adapter(caller, request.name)
            except NotFound as error:
                if error.reason != "ADAPTER_NOT_FOUND":
                    raise
                return None

        handles = self._lifecycle.served().engine_handles()
        infos = [info for info in await self._on_each(unload, handles) if info is not None]
        if not infos:
            raise NotFound(f"no adapter {request.name!r} is loaded", reason="ADAPTER_NOT_FOUND")
        return pb.UnloadAdapterResponse(adapter=convert.adapter_to_proto(merge_adapters(infos)[0]))

    async def list_adapters(self, caller: Caller, request: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
        handles = self._lifecycle.served().engine_handles()
        lists = await asyncio.gather(*(handle.engine.adapters(caller) for handle in handles))
        merged = merge_adapters([info for infos in lists for info in infos])
        return pb.ListAdaptersResponse(
            adapters=[convert.adapter_to_proto(info) for info in merged],
            slots=min((handle.engine.info.adapter_slots for handle in handles), default=0),
        )

    async def _on_each(
        self, call: Callable[[EngineHandle], Awaitable[T]], handles: Sequence[EngineHandle]
    ) -> Sequence[T]:
        """What `call` returns for each engine. If it raises for some, the first error, once it has ended for all.

        Raises Unavailable (ENGINE_LOST) without engines. Which adapters each engine has is known here afterwards.
        """
        state = self._lifecycle.served()
        if not handles:
            raise state.engines.no_engine_error()
        results = await asyncio.gather(*(call(handle) for handle in handles), return_exceptions=True)
        if state.model is None:
            await asyncio.gather(*(handle.engine.stats() for handle in handles), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]


def merge_adapters(infos: Sequence[AdapterInfo]) -> list[AdapterInfo]:
    """One entry for each name and content, with the contexts of all engines: names in order, then unloaded ones."""
    merged: dict[tuple[bool, str, str], AdapterInfo] = {}
    for info in infos:
        key = (info.unloaded, info.name, info.revision)
        before = merged.get(key)
        merged[key] = info if before is None else replace(info, contexts=info.contexts + before.contexts)
    return [merged[key] for key in sorted(merged)]
