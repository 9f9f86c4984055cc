"""What a model and its engine answer: of contexts, of snapshots, and of the model. In a router see router.py."""

import asyncio
from collections.abc import Sequence

from jaxctx.convert import decode
from jaxctx.engine.interface import Caller
from jaxctx.services import ENGINE_CALLS, SERVICES
from jaxctx.types import FillResult, ForwardRequest, ForwardResult, PlanResult
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.service import Service, answered, handed
from jaxctx_server.lifecycle import LocalModel
from jaxctx_server.tokenizer_pool import Nothing
from jaxctx_server.validate.cross_field import made

FEW_MASKS = 256  # that are read on the event loop: up to 4 ms


class _Held:
    """What a context of an engine holds."""

    def __init__(self, model: LocalModel, caller: Caller, context_id: str) -> None:
        self._model, self._caller, self._context_id = model, caller, context_id

    async def is_empty(self) -> bool:
        info = (await self._model.engine.inspect(self._caller, self._context_id)).context
        return info.seq_len + info.buffered_tokens == 0

    async def tokens(self) -> Sequence[int]:
        found = await self._model.engine.inspect(self._caller, self._context_id, include_tokens=True)
        return () if found.tokens is None else found.tokens.ids


async def _tokens(model: LocalModel, caller: Caller, request: pb.FillRequest | pb.PlanRequest) -> Sequence[int]:
    """What a request would append. That may depend on what its context holds; a new one holds nothing."""
    before = _Held(model, caller, request.context_id) if request.context_id else Nothing()
    return await model.texts.tokens(request, before)


async def _fill(model: LocalModel, caller: Caller, request: pb.FillRequest) -> FillResult:
    tokens = await _tokens(model, caller, request)
    return await model.engine.fill(caller, request.context_id, tokens, defer=request.defer)


async def _plan(model: LocalModel, caller: Caller, request: pb.PlanRequest) -> PlanResult:
    tokens = await _tokens(model, caller, request)
    return await model.engine.plan(caller, tokens, context_id=request.context_id or None, salt=request.salt)


async def _forward(model: LocalModel, caller: Caller, request: pb.ForwardRequest) -> ForwardResult:
    if len(request.masks) <= FEW_MASKS:
        asked = decode(request, ForwardRequest)
    else:
        asked = await asyncio.to_thread(decode, request, ForwardRequest)
    return await model.engine.forward(caller, asked)


class ContextService(Service):
    """See the service in protos/jaxctx/v1/context_service.proto."""

    Forward = answered("Forward", _forward)
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
        # What an engine does by one call is handed to it.
        if each.name in ENGINE_CALLS and each.name not in vars(service):
            setattr(service, each.name, handed(each.name, *ENGINE_CALLS[each.name]))
