# ruff: noqa: N802 - gRPC names the methods
"""ContextService: decode, validate, engine, encode."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import TypeVar, cast

from google.protobuf.message import Message

from jaxctx.answers import ContextInfo
from jaxctx.codec import encode
from jaxctx.engine.interface import Caller
from jaxctx.v1 import content_pb2, context_pb2, context_service_pb2_grpc
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import Service, first_page
from jaxctx_server.serving import Served
from jaxctx_server.validate import contexts, generation

M = TypeVar("M", bound=Message)


class ContextService(Service, context_service_pb2_grpc.ContextServiceServicer):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    async def CreateContext(self, request: pb.CreateContextRequest, context: Context) -> pb.CreateContextResponse:
        served, caller, (model_id, wanted) = self.begin(context, request, contexts.create)
        served.check_model(model_id)
        return pb.CreateContextResponse(context=_context(await served.engine.create(caller, wanted)))

    async def Fill(self, request: pb.FillRequest, context: Context) -> pb.FillResponse:
        served, caller, (context_id, content, defer) = self.begin(context, request, contexts.fill)
        tokens = await served.texts.tokens(content, partial(_is_empty, served, caller, context_id))
        return encode(await served.engine.fill(caller, context_id, tokens, defer=defer), pb.FillResponse)

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        served, caller, context_id = self.begin(context, request, contexts.context)
        return encode(await served.engine.flush(caller, context_id), pb.FlushResponse)

    def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        served, caller, wanted = self.begin(context, request, generation.generate)
        return _encoded(served.engine.generate(caller, wanted), pb.GenerateResponse)

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardResponse:
        served, caller, wanted = self.begin(context, request, generation.forward)
        return encode(await served.engine.forward(caller, wanted), pb.ForwardResponse)

    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        served, caller, (parent_id, ids) = self.begin(context, request, contexts.fork)
        children = await served.engine.fork(caller, parent_id, ids)
        return pb.ForkResponse(contexts=[_context(child) for child in children])

    async def Truncate(self, request: pb.TruncateRequest, context: Context) -> pb.TruncateResponse:
        served, caller, asked = self.begin(context, request, contexts.count("tokens"))
        return pb.TruncateResponse(context=_context(await served.engine.truncate(caller, *asked)))

    async def Rewind(self, request: pb.RewindRequest, context: Context) -> pb.RewindResponse:
        served, caller, asked = self.begin(context, request, contexts.count("to"))
        return pb.RewindResponse(context=_context(await served.engine.rewind(caller, *asked)))

    async def GetContext(self, request: pb.GetContextRequest, context: Context) -> pb.GetContextResponse:
        served, caller, (context_id, pages, tokens, ancestors) = self.begin(context, request, contexts.get)
        info = await served.engine.get(caller, context_id)
        layout = await served.engine.pages(caller, context_id) if pages or tokens or ancestors else None
        forks = [context_pb2.Ancestor(context_id=id_, forked_at=at) for id_, at in layout.ancestors] if layout else ()
        return pb.GetContextResponse(
            context=_context(info),
            pages=encode(layout, context_pb2.ContextPages) if layout and pages else None,
            tokens=content_pb2.TokenIds(ids=layout.tokens) if layout and tokens else None,
            ancestors=forks if ancestors else (),
        )

    async def ListContexts(self, request: pb.ListContextsRequest, context: Context) -> pb.ListContextsResponse:
        served, caller, (after, limit) = self.begin(context, request, contexts.page)
        found = await served.engine.list(caller, after=after, limit=limit + 1)
        listed, token = first_page(found, limit, lambda info: info.context_id)
        return pb.ListContextsResponse(contexts=[_context(info) for info in listed], next_page_token=token)

    def WatchContexts(
        self, request: pb.WatchContextsRequest, context: Context
    ) -> AsyncIterator[pb.WatchContextsResponse]:
        return _encoded(self._serving.served().engine.watch(self.caller(context)), pb.WatchContextsResponse)

    async def Compare(self, request: pb.CompareRequest, context: Context) -> pb.CompareResponse:
        served, caller, pair = self.begin(context, request, contexts.compare)
        return encode(await served.engine.compare(caller, *pair), pb.CompareResponse)

    async def UpdateContext(self, request: pb.UpdateContextRequest, context: Context) -> pb.UpdateContextResponse:
        served, caller, (context_id, changes) = self.begin(context, request, contexts.update)
        info = await served.engine.update(caller, context_id, changes)
        return pb.UpdateContextResponse(context=_context(info))

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        served, caller, (context_id, model_id, salt, content) = self.begin(context, request, contexts.plan)
        served.check_model(model_id)
        tokens = await served.texts.tokens(content, partial(_is_empty, served, caller, context_id))
        return encode(await served.engine.plan(caller, tokens, context_id=context_id, salt=salt), pb.PlanResponse)

    async def ReservePages(self, request: pb.ReservePagesRequest, context: Context) -> pb.ReservePagesResponse:
        served, caller, asked = self.begin(context, request, contexts.count("pages"))
        return pb.ReservePagesResponse(context=_context(await served.engine.reserve_pages(caller, *asked)))

    async def CommitPages(self, request: pb.CommitPagesRequest, context: Context) -> pb.CommitPagesResponse:
        served, caller, asked = self.begin(context, request, contexts.count("pages"))
        return pb.CommitPagesResponse(context=_context(await served.engine.commit_pages(caller, *asked)))

    async def ReleasePages(self, request: pb.ReleasePagesRequest, context: Context) -> pb.ReleasePagesResponse:
        served, caller, asked = self.begin(context, request, contexts.count("pages"))
        return pb.ReleasePagesResponse(context=_context(await served.engine.release_pages(caller, *asked)))

    async def CloseContext(self, request: pb.CloseContextRequest, context: Context) -> pb.CloseContextResponse:
        served, caller, context_id = self.begin(context, request, contexts.context)
        await served.engine.close(caller, context_id)
        return pb.CloseContextResponse()


def _context(info: ContextInfo) -> context_pb2.Context:
    return encode(info, context_pb2.Context)


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
