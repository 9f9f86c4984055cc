# ruff: noqa: N802 - gRPC names the methods
"""ContextService over gRPC: contexts. Each method calls its namesake of the service layer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceServicer
from jaxctx_server.grpc.caller import CallerFactory, Context
from jaxctx_server.service.interface import ContextService


class ContextServicer(ContextServiceServicer):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    def __init__(self, service: ContextService, callers: CallerFactory) -> None:
        self._service = service
        self._callers = callers

    async def CreateContext(self, request: pb.CreateContextRequest, context: Context) -> pb.CreateContextResponse:
        return await self._service.create_context(self._callers.caller(context), request)

    async def Fill(self, request: pb.FillRequest, context: Context) -> pb.FillResponse:
        return await self._service.fill(self._callers.caller(context), request)

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        return await self._service.flush(self._callers.caller(context), request)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        caller = self._callers.caller(context)
        async with aclosing(self._service.generate(caller, request)) as responses:
            async for response in responses:
                yield response

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardResponse:
        return await self._service.forward(self._callers.caller(context), request)

    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        return await self._service.fork(self._callers.caller(context), request)

    async def Truncate(self, request: pb.TruncateRequest, context: Context) -> pb.TruncateResponse:
        return await self._service.truncate(self._callers.caller(context), request)

    async def Rewind(self, request: pb.RewindRequest, context: Context) -> pb.RewindResponse:
        return await self._service.rewind(self._callers.caller(context), request)

    async def SwitchAdapter(self, request: pb.SwitchAdapterRequest, context: Context) -> pb.SwitchAdapterResponse:
        return await self._service.switch_adapter(self._callers.caller(context), request)

    async def GetContext(self, request: pb.GetContextRequest, context: Context) -> pb.GetContextResponse:
        return await self._service.get_context(self._callers.caller(context), request)

    async def ListContexts(self, request: pb.ListContextsRequest, context: Context) -> pb.ListContextsResponse:
        return await self._service.list_contexts(self._callers.caller(context), request)

    async def WatchContexts(
        self, request: pb.WatchContextsRequest, context: Context
    ) -> AsyncGenerator[pb.WatchContextsResponse, None]:
        caller = self._callers.caller(context)
        async with aclosing(self._service.watch_contexts(caller, request)) as responses:
            async for response in responses:
                yield response

    async def Compare(self, request: pb.CompareRequest, context: Context) -> pb.CompareResponse:
        return await self._service.compare(self._callers.caller(context), request)

    async def UpdateContext(self, request: pb.UpdateContextRequest, context: Context) -> pb.UpdateContextResponse:
        return await self._service.update_context(self._callers.caller(context), request)

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        return await self._service.plan(self._callers.caller(context), request)

    async def ReservePages(self, request: pb.ReservePagesRequest, context: Context) -> pb.ReservePagesResponse:
        return await self._service.reserve_pages(self._callers.caller(context), request)

    async def CommitPages(self, request: pb.CommitPagesRequest, context: Context) -> pb.CommitPagesResponse:
        return await self._service.commit_pages(self._callers.caller(context), request)

    async def ReleasePages(self, request: pb.ReleasePagesRequest, context: Context) -> pb.ReleasePagesResponse:
        return await self._service.release_pages(self._callers.caller(context), request)

    async def CloseContext(self, request: pb.CloseContextRequest, context: Context) -> pb.CloseContextResponse:
        return await self._service.close_context(self._callers.caller(context), request)
