# ruff: noqa: N802 - gRPC names the methods
"""ContextService: decode, validate, engine, encode."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

from jaxctx.codec import decode, encode
from jaxctx.engine.interface import Caller, GenerateRequest
from jaxctx.v1 import content_pb2, context_pb2
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import M, Service, one_more, unary, with_engine_calls
from jaxctx_server.serving import LocalModel
from jaxctx_server.validate import requests


@with_engine_calls
class ContextService(Service):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    Flush = unary("Flush", "fill", ["context_id"])
    Fork = unary("Fork", "fork", ["context_id", requests.children])
    ListContexts = unary("ListContexts", "list", ["page_token", one_more])

    async def Fill(self, request: pb.FillRequest, context: Context) -> pb.FillResponse:
        served, caller = self.begin(context, request)
        tokens = await _tokens(served, caller, request)
        found = await served.engine.fill(caller, request.context_id, tokens, defer=request.defer)
        return encode(found, pb.FillResponse)

    def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        served, caller = self.begin(context, request)
        return _encoded(served.engine.generate(caller, decode(request, GenerateRequest)), pb.GenerateResponse)

    async def GetContext(self, request: pb.GetContextRequest, context: Context) -> pb.GetContextResponse:
        served, caller = self.begin(context, request)
        pages, tokens, ancestors = request.include_pages, request.include_tokens, request.include_ancestors
        info = await served.engine.get(caller, request.context_id)
        layout = await served.engine.pages(caller, request.context_id) if pages or tokens or ancestors else None
        forks = [context_pb2.Ancestor(context_id=id_, forked_at=at) for id_, at in layout.ancestors] if layout else ()
        return pb.GetContextResponse(
            context=encode(info, context_pb2.Context),
            pages=encode(layout, context_pb2.ContextPages) if layout and pages else None,
            tokens=content_pb2.TokenIds(ids=layout.tokens) if layout and tokens else None,
            ancestors=forks if ancestors else (),
        )

    def WatchContexts(
        self, request: pb.WatchContextsRequest, context: Context
    ) -> AsyncIterator[pb.WatchContextsResponse]:
        return _encoded(self._serving.model().engine.watch(self.caller(context)), pb.WatchContextsResponse)

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        served, caller = self.begin(context, request)
        tokens = await _tokens(served, caller, request)
        found = await served.engine.plan(caller, tokens, context_id=request.context_id or None, salt=request.salt)
        return encode(found, pb.PlanResponse)


async def _encoded(answers: AsyncIterator[object], kind: type[M]) -> AsyncIterator[M]:
    """Each as a message. They are closed at once with whoever reads them."""
    async with aclosing(cast(AsyncGenerator[object, None], answers)) as closing:
        async for answer in closing:
            yield encode(answer, kind)


async def _tokens(served: LocalModel, caller: Caller, request: pb.FillRequest | pb.PlanRequest) -> Sequence[int]:
    """What a request would append. That may depend on whether its context has tokens yet; a new one has none."""

    async def is_empty() -> bool:
        info = await served.engine.get(caller, request.context_id) if request.context_id else None
        return info is None or info.seq_len + info.buffered_tokens == 0

    return await served.texts.tokens(requests.content(request), is_empty)
