# ruff: noqa: N802 - gRPC names the methods
"""ModelService: the served model, its tokenizer and its chat template."""

from __future__ import annotations

from jaxctx.v1 import model_service_pb2 as pb
from jaxctx.v1 import model_service_pb2_grpc
from jaxctx_server import requests
from jaxctx_server.grpc import encode
from jaxctx_server.grpc.decode import decode
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.serving import Serving
from jaxctx_server.validate import contexts, models


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """See the service in protos/jaxctx/v1/model_service.proto."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        served = self._serving.served()
        page = contexts.page(served.limits, decode(request, requests.ListModelsRequest))
        models_after = [info for info in (served.engine.info,) if info.model_id > page.after]
        return pb.ListModelsResponse(models=[encode.model(info) for info in models_after])

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        served = self._serving.served()
        served.check_model(models.get(served.limits, decode(request, requests.GetModelRequest)))
        return pb.GetModelResponse(model=encode.model(served.engine.info))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        served = self._serving.served()
        tokenize = models.tokenize(served.limits, decode(request, requests.TokenizeRequest))
        served.check_model(tokenize.model_id)
        return pb.TokenizeResponse(tokens=await served.texts.encode(tokenize.content))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        served = self._serving.served()
        detokenize = models.detokenize(served.limits, decode(request, requests.DetokenizeRequest))
        served.check_model(detokenize.model_id)
        skip = detokenize.skip_special_tokens
        return pb.DetokenizeResponse(text=await served.texts.decode(detokenize.tokens, skip_special_tokens=skip))

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        served = self._serving.served()
        apply = models.apply_chat_template(served.limits, decode(request, requests.ApplyChatTemplateRequest))
        served.check_model(apply.model_id)
        text, tokens = await served.texts.render(apply.content)
        return pb.ApplyChatTemplateResponse(text=text, tokens=tokens)
