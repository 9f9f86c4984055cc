"""What a model and its engine answer: of contexts, of snapshots, and of the model. In a core see router.py."""

from collections.abc import Sequence

from jaxctx.answers import FillResult, PlanResult
from jaxctx.engine.interface import Caller
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.services import ENGINE_CALLS, SERVICES
from jaxctx_server.grpc.service import Service, answered, handed
from jaxctx_server.serving import LocalModel
from jaxctx_server.validate.requests import made


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


class ContextService(Service):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    Fill = answered("Fill", _fill)
    Flush = handed("Flush", "fill", ["context_id"])
    Plan = answered("Plan", _plan)


class SnapshotService(Service):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""


class ModelService(Service):
    """See the service in protos/jaxctx/v1/model_service.proto."""

    ListModels = answered("ListModels", lambda model, _, asked: [model.engine.info])
    GetModel = answered("GetModel", lambda model, _, asked: model.engine.info)
    Tokenize = answered(
        "Tokenize",
        lambda model, _, asked: model.texts.encode(
            asked.text, add_special_tokens=made(asked, "add_special_tokens") is not False
        ),
    )
    Detokenize = answered(
        "Detokenize",
        lambda model, _, asked: model.texts.decode(asked.tokens[:], skip_special_tokens=asked.skip_special_tokens),
    )
    ApplyChatTemplate = answered("ApplyChatTemplate", lambda model, _, asked: model.texts.render(asked.messages))


for service in (ContextService, SnapshotService):
    for each in SERVICES[service.__name__].methods:
        if each.name in ENGINE_CALLS:  # what an engine does by one call is handed to it
            setattr(service, each.name, handed(each.name, *ENGINE_CALLS[each.name]))
