# ruff: noqa: N802 - gRPC names the methods
"""ContextService: decode, validate, engine, encode."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from jaxctx.answers import FillResult, PlanResult
from jaxctx.codec import decode, encode
from jaxctx.engine.interface import Caller, GenerateRequest
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import M, Service, answered, one_more, unary, with_engine_calls
from jaxctx_server.serving import LocalModel
from jaxctx_server.validate import requests


async def _tokens(model: LocalModel, caller: Caller, request: pb.FillRequest | pb.PlanRequest) -> Sequence[int]:
    """What a request would append. That may depend on whether its context has tokens yet; a new one has none."""

    async def is_empty() -> bool:
        info = await model.engine.get(caller, request.context_id) if request.context_id else None
        return info is None or info.seq_len + info.buffered_tokens == 0

    return await model.texts.tokens(request, is_empty)


async def _fill(model: LocalModel, caller: Caller, request: pb.FillRequest) -> FillResult:
    tokens = await _tokens(model, caller, request)
    return await model.engine.fill(caller, request.context_id, tokens, defer=request.defer)


async def _plan(model: LocalModel, caller: Caller, request: pb.PlanRequest) -> PlanResult:
    tokens = await _tokens(model, caller, request)
    return await model.engine.plan(caller, tokens, context_id=request.context_id or None, salt=request.salt)


async def _encoded(answers: AsyncIterator[object], kind: type[M]) -> AsyncIterator[M]:
    """Each as a message. They are closed at once with whoever reads them."""
    async with aclosing(cast(AsyncGenerator[object, None], answers)) as closing:
        async for answer in closing:
            yield encode(answer, kind)


@with_engine_calls
class ContextService(Service):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    Fill = answered("Fill", _fill)
    Flush = unary("Flush", "fill", ["context_id"])
    Fork = unary("Fork", "fork", ["context_id", requests.children])
    ListContexts = unary("ListContexts", "list", ["page_token", one_more])
    Plan = answered("Plan", _plan)

    def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[Any]:
        model, caller = self.begin(context, request)
        return _encoded(model.engine.generate(caller, decode(request, GenerateRequest)), pb.GenerateResponse)

    def WatchContexts(self, request: pb.WatchContextsRequest, context: Context) -> AsyncIterator[Any]:
        return _encoded(self._serving.model().engine.watch(self.caller(context)), pb.WatchContextsResponse)
