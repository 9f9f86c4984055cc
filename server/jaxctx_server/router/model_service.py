"""ModelService of a router."""

from jaxctx.engine.interface import Caller
from jaxctx.v1 import model_service_pb2 as pb
from jaxctx_server.router.forwarding import ForwardedCall, Forwarder
from jaxctx_server.router.listing import Lister, entries_to_ask_for
from jaxctx_server.service.paging import page_by_id


class RouterModelService:
    """Implements `jaxctx_server.service.interface.ModelService`."""

    def __init__(self, forwarder: Forwarder, lister: Lister) -> None:
        self._forwarder = forwarder
        self._lister = lister

    async def list_models(self, caller: Caller, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        asked = pb.ListModelsRequest(limit=entries_to_ask_for(request.limit), page_token=request.page_token)
        pages = await self._lister.pages(lambda engine: engine.models.ListModels, caller, asked)
        models = [model for _, response in pages for model in response.models]
        page = page_by_id(models, lambda model: model.model_id, page_token=asked.page_token, found=asked.limit)
        return pb.ListModelsResponse(models=page.entries, next_page_token=page.next_page_token)

    async def get_model(self, caller: Caller, request: pb.GetModelRequest) -> pb.GetModelResponse:
        call = ForwardedCall(caller=caller, request=request, model_id=request.model_id)
        _, response = await self._forwarder.ask(call, lambda engine: engine.models.GetModel)
        return response

    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        call = ForwardedCall(caller=caller, request=request, model_id=request.model_id)
        _, response = await self._forwarder.ask(call, lambda engine: engine.models.Tokenize)
        return response

    async def detokenize(self, caller: Caller, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        call = ForwardedCall(caller=caller, request=request, model_id=request.model_id)
        _, response = await self._forwarder.ask(call, lambda engine: engine.models.Detokenize)
        return response

    async def apply_chat_template(
        self, caller: Caller, request: pb.ApplyChatTemplateRequest
    ) -> pb.ApplyChatTemplateResponse:
        call = ForwardedCall(caller=caller, request=request, model_id=request.model_id)
        _, response = await self._forwarder.ask(call, lambda engine: engine.models.ApplyChatTemplate)
        return response
