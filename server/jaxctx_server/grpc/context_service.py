# ruff: noqa: N802 - gRPC names the methods
"""ContextService: decode, validate, engine, encode."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import cast

from jaxctx.codec import encode
from jaxctx.engine.interface import Caller, Engine
from jaxctx.v1 import content_pb2, context_pb2, context_service_pb2_grpc
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import M, Service, one, page_of, told, unary
from jaxctx_server.serving import Served
from jaxctx_server.validate import contexts, generation


class ContextService(Service, context_service_pb2_grpc.ContextServiceServicer):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    Forward = unary(one(generation.forward), Engine.forward, pb.ForwardResponse)
    Fork = unary(contexts.fork, Engine.fork, pb.ForkResponse, "contexts")
    Truncate = unary(contexts.count("tokens"), Engine.truncate, pb.TruncateResponse, "context")
    Rewind = unary(contexts.count("to"), Engine.rewind, pb.RewindResponse, "context")
    Compare = unary(contexts.compare, Engine.compare, pb.CompareResponse)
    UpdateContext = unary(contexts.update, Engine.update, pb.UpdateContextResponse, "context")
    ReservePages = unary(contexts.count("pages"), Engine.reserve_pages, pb.ReservePagesResponse, "context")
    CommitPages = unary(contexts.count("pages"), Engine.commit_pages, pb.CommitPagesResponse, "context")
    ReleasePages = unary(contexts.count("pages"), Engine.release_pages, pb.ReleasePagesResponse, "context")
    CloseContext = unary(one(contexts.context), Engine.close, pb.CloseContextResponse)

    async def CreateContext(self, request: pb.CreateContextRequest, context: Context) -> pb.CreateContextResponse:
        served, caller, (model_id, wanted) = self.begin(context, request, contexts.create)
        served.check_model(model_id)
        return told(await served.engine.create(caller, wanted), pb.CreateContextResponse, "context")

    async def Fill(self, request: pb.FillRequest, context: Context) -> pb.FillResponse:
        served, caller, (context_id, content, defer) = self.begin(context, request, contexts.fill)
        tokens = await served.texts.tokens(content, partial(_is_empty, served, caller, context_id))
        return encode(await served.engine.fill(caller, context_id, tokens, defer=defer), pb.FillResponse)

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        served, caller, context_id = self.begin(context, request, contexts.context)
        return encode(await served.engine.fill(caller, context_id), pb.FlushResponse)

    def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        served, caller, wanted = self.begin(context, request, generation.generate)
        return _encoded(served.engine.generate(caller, wanted), pb.GenerateResponse)

    async def GetContext(self, request: pb.GetContextRequest, context: Context) -> pb.GetContextResponse:
        served, caller, (context_id, pages, tokens, ancestors) = self.begin(context, request, contexts.get)
        info = await served.engine.get(caller, context_id)
        layout = await served.engine.pages(caller, context_id) if pages or tokens or ancestors else None
        forks = [context_pb2.Ancestor(context_id=id_, forked_at=at) for id_, at in layout.ancestors] if layout else ()
        return pb.GetContextResponse(
            context=encode(info, context_pb2.Context),
            pages=encode(layout, context_pb2.ContextPages) if layout and pages else None,
            tokens=content_pb2.TokenIds(ids=layout.tokens) if layout and tokens else None,
            ancestors=forks if ancestors else (),
        )

    async def ListContexts(self, request: pb.ListContextsRequest, context: Context) -> pb.ListContextsResponse:
        served, caller, (after, limit) = self.begin(context, request, contexts.page)
        found = await served.engine.list(caller, after, limit + 1)
        return page_of(found, limit, lambda info: info.context_id, pb.ListContextsResponse, "contexts")

    def WatchContexts(
        self, request: pb.WatchContextsRequest, context: Context
    ) -> AsyncIterator[pb.WatchContextsResponse]:
        return _encoded(self._serving.served().engine.watch(self.caller(context)), pb.WatchContextsResponse)

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        served, caller, (context_id, model_id, salt, content) = self.begin(context, request, contexts.plan)
        served.check_model(model_id)
        tokens = await served.texts.tokens(content, partial(_is_empty, served, caller, context_id))
        return encode(await served.engine.plan(caller, tokens, context_id=context_id, salt=salt), pb.PlanResponse)


async def _encoded(answers: AsyncIterator[object], kind: type[M]) -> AsyncIterator[M]:
    """Each as a message. They are closed at once with whoever reads them."""
    async with aclosing(cast(AsyncGenerator[object, None], answers)) as closing:
        async for answer in closing:
            yield encode(answer, kind)


async def _is_empty(served: Served, caller: Caller, context_id: str | None) -> bool:
    """Whether a context has no tokens yet; a new one (None) has none."""
    if context_id is None:
        return True
    info = await served.engine.get(caller, context_id)
    return info.seq_len + info.buffered_tokens == 0
