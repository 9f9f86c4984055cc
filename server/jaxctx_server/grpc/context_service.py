# ruff: noqa: N802 - gRPC names the methods
"""ContextService: decode, validate, engine, encode."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import cast

from jaxctx.engine.interface import Caller, ContextEvent, ContextInfo
from jaxctx.v1 import content_pb2, context_pb2, context_service_pb2_grpc
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server import requests
from jaxctx_server.grpc import encode
from jaxctx_server.grpc.decode import decode
from jaxctx_server.grpc.merge import merged
from jaxctx_server.grpc.pipeline import Context, caller
from jaxctx_server.serving import Served, Serving
from jaxctx_server.validate import Content, contexts, generation, passes


class ContextService(context_service_pb2_grpc.ContextServiceServicer):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    def __init__(self, serving: Serving, clock: Callable[[], float]) -> None:
        """`clock`: the one of the engine's deadlines."""
        self._serving = serving
        self._clock = clock

    async def CreateContext(self, request: pb.CreateContextRequest, context: Context) -> pb.CreateContextResponse:
        served = self._serving.served()
        checked = contexts.create(served.limits, decode(request, requests.CreateContextRequest))
        served.check_model(checked.model_id)
        info = await served.engine.create(self._caller(context), checked.request)
        return pb.CreateContextResponse(context=_context(served, info))

    async def Fill(self, request: pb.FillRequest, context: Context) -> pb.FillResponse:
        served, caller = self._serving.served(), self._caller(context)
        fill = contexts.fill(served.limits, decode(request, requests.FillRequest))
        empty = await _empty(served, caller, fill.context_id, fill.content)
        tokens = await served.texts.tokens(fill.content, empty=empty)
        result = await served.engine.fill(caller, fill.context_id, tokens, defer=fill.defer)
        return encode.filled(pb.FillResponse, result, served.engine.info.model_id)

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        served = self._serving.served()
        context_id = contexts.context(decode(request, requests.FlushRequest))
        result = await served.engine.flush(self._caller(context), context_id)
        return encode.filled(pb.FlushResponse, result, served.engine.info.model_id)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        served = self._serving.served()
        checked = generation.generate(served.limits, decode(request, requests.GenerateRequest))
        model_id = served.engine.info.model_id
        async with aclosing(merged(served.engine.generate(self._caller(context), checked))) as pieces:
            async for piece in pieces:
                yield encode.piece(piece, model_id)

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardResponse:
        served = self._serving.served()
        checked = passes.forward(served.limits, decode(request, requests.ForwardRequest))
        result = await served.engine.forward(self._caller(context), checked)
        return pb.ForwardResponse(
            outputs=[encode.pass_result(each) for each in result.outputs], context=_context(served, result.context)
        )

    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        served = self._serving.served()
        fork = contexts.fork(served.limits, decode(request, requests.ForkRequest))
        children = await served.engine.fork(self._caller(context), fork.context_id, fork.ids)
        return pb.ForkResponse(contexts=[_context(served, child) for child in children])

    async def Truncate(self, request: pb.TruncateRequest, context: Context) -> pb.TruncateResponse:
        served = self._serving.served()
        truncate = contexts.truncate(decode(request, requests.TruncateRequest))
        info = await served.engine.truncate(self._caller(context), truncate.context_id, truncate.count)
        return pb.TruncateResponse(context=_context(served, info))

    async def Rewind(self, request: pb.RewindRequest, context: Context) -> pb.RewindResponse:
        served = self._serving.served()
        rewind = contexts.rewind(decode(request, requests.RewindRequest))
        info = await served.engine.rewind(self._caller(context), rewind.context_id, rewind.count)
        return pb.RewindResponse(context=_context(served, info))

    async def GetContext(self, request: pb.GetContextRequest, context: Context) -> pb.GetContextResponse:
        served, caller = self._serving.served(), self._caller(context)
        get = contexts.get(served.limits, decode(request, requests.GetContextRequest))
        info = await served.engine.get(caller, get.context_id)
        response = pb.GetContextResponse(context=_context(served, info))
        if get.include_pages or get.include_tokens:
            layout = await served.engine.pages(caller, get.context_id)
            if get.include_pages:
                response.pages.CopyFrom(encode.pages(layout))
            if get.include_tokens:
                response.tokens.CopyFrom(content_pb2.TokenIds(ids=layout.tokens))
        return response

    async def ListContexts(self, request: pb.ListContextsRequest, context: Context) -> pb.ListContextsResponse:
        served = self._serving.served()
        page = contexts.page(served.limits, decode(request, requests.ListContextsRequest))
        found = await served.engine.list(self._caller(context), after=page.after, limit=page.limit + 1)
        listed = found[: page.limit]
        return pb.ListContextsResponse(
            contexts=[_context(served, info) for info in listed],
            next_page_token=listed[-1].context_id if len(found) > len(listed) else "",
        )

    async def WatchContexts(
        self, request: pb.WatchContextsRequest, context: Context
    ) -> AsyncIterator[pb.WatchContextsResponse]:
        served = self._serving.served()
        watch = cast("AsyncGenerator[ContextEvent, None]", served.engine.watch(self._caller(context)))
        async with aclosing(watch) as events:
            async for event in events:
                yield encode.event(event, served.engine.info.model_id)

    async def Compare(self, request: pb.CompareRequest, context: Context) -> pb.CompareResponse:
        served = self._serving.served()
        a, b = contexts.compare(decode(request, requests.CompareRequest))
        return pb.CompareResponse(**asdict(await served.engine.compare(self._caller(context), a, b)))

    async def UpdateContext(self, request: pb.UpdateContextRequest, context: Context) -> pb.UpdateContextResponse:
        served = self._serving.served()
        update = contexts.update(served.limits, decode(request, requests.UpdateContextRequest))
        info = await served.engine.update(
            self._caller(context),
            update.context_id,
            priority=update.priority,
            pinned=update.pinned,
            pin_s=update.pin_s,
            ttl=update.ttl,
            labels=update.labels,
        )
        return pb.UpdateContextResponse(context=_context(served, info))

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        served, caller = self._serving.served(), self._caller(context)
        plan = contexts.plan(served.limits, decode(request, requests.PlanRequest))
        served.check_model(plan.model_id)
        empty = plan.context_id is None or await _empty(served, caller, plan.context_id, plan.content)
        tokens = await served.texts.tokens(plan.content, empty=empty)
        return encode.plan(await served.engine.plan(caller, tokens, context_id=plan.context_id, salt=plan.salt))

    async def ReservePages(self, request: pb.ReservePagesRequest, context: Context) -> pb.ReservePagesResponse:
        served = self._serving.served()
        reserve = contexts.pages(decode(request, requests.ReservePagesRequest))
        info = await served.engine.reserve_pages(self._caller(context), reserve.context_id, reserve.count)
        return pb.ReservePagesResponse(context=_context(served, info))

    async def CommitPages(self, request: pb.CommitPagesRequest, context: Context) -> pb.CommitPagesResponse:
        served = self._serving.served()
        commit = contexts.pages(decode(request, requests.CommitPagesRequest))
        info = await served.engine.commit_pages(self._caller(context), commit.context_id, commit.count)
        return pb.CommitPagesResponse(context=_context(served, info))

    async def ReleasePages(self, request: pb.ReleasePagesRequest, context: Context) -> pb.ReleasePagesResponse:
        served = self._serving.served()
        release = contexts.pages(decode(request, requests.ReleasePagesRequest))
        info = await served.engine.release_pages(self._caller(context), release.context_id, release.count)
        return pb.ReleasePagesResponse(context=_context(served, info))

    async def CloseContext(self, request: pb.CloseContextRequest, context: Context) -> pb.CloseContextResponse:
        served = self._serving.served()
        context_id = contexts.context(decode(request, requests.CloseContextRequest))
        await served.engine.close(self._caller(context), context_id)
        return pb.CloseContextResponse()

    def _caller(self, context: Context) -> Caller:
        return caller(context, self._clock)


def _context(served: Served, info: ContextInfo) -> context_pb2.Context:
    return encode.context(info, served.engine.info.model_id)


async def _empty(served: Served, caller: Caller, context_id: str, content: Content) -> bool:
    """Whether the context has no tokens yet; asked only where the content's tokens depend on it."""
    if not served.texts.depends_on_context(content):
        return False
    info = await served.engine.get(caller, context_id)
    return info.seq_len + info.buffered_tokens == 0
