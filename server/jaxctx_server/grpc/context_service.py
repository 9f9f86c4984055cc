"""ContextService: decode, validate, engine, encode."""

from collections.abc import Sequence

from jaxctx.answers import FillResult, PlanResult
from jaxctx.engine.interface import Caller
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.service import Service, answered, handed, with_engine_calls
from jaxctx_server.serving import LocalModel


async def _tokens(model: LocalModel, caller: Caller, request: pb.FillRequest | pb.PlanRequest) -> Sequence[int]:
    """What a request would append. That may depend on whether its context has tokens yet; a new one has none."""

    async def is_empty() -> bool:
        if not request.context_id:
            return True
        info = (await model.engine.inspect(caller, request.context_id)).context
        return info.seq_len + info.buffered_tokens == 0

    return await model.texts.tokens(request, is_empty)


async def _fill(model: LocalModel, caller: Caller, request: pb.FillRequest) -> FillResult:
    tokens = await _tokens(model, caller, request)
    return await model.engine.fill(caller, request.context_id, tokens, defer=request.defer)


async def _plan(model: LocalModel, caller: Caller, request: pb.PlanRequest) -> PlanResult:
    tokens = await _tokens(model, caller, request)
    return await model.engine.plan(caller, tokens, context_id=request.context_id or None, salt=request.salt)


@with_engine_calls
class ContextService(Service):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    Fill = answered("Fill", _fill)
    Flush = handed("Flush", "fill", ["context_id"])
    Plan = answered("Plan", _plan)
