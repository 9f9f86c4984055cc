# ruff: noqa: N802 - gRPC names the methods
"""ModelService: the served model, its tokenizer and its chat template."""

from typing import Any

from jaxctx.v1 import model_service_pb2 as pb
from jaxctx.v1 import model_service_pb2_grpc
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import Service, page_of, told
from jaxctx_server.validate.requests import made, messages


class ModelService(Service, model_service_pb2_grpc.ModelServiceServicer):
    """See the service in protos/jaxctx/v1/model_service.proto."""

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> Any:
        served, _ = self.begin(context, request)
        return page_of("ListModels", request, [served.engine.info])

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> Any:
        served, _ = self.begin(context, request)
        return told("GetModel", served.engine.info)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        served, _ = self.begin(context, request)
        special = made(request, "add_special_tokens") is not False
        return pb.TokenizeResponse(tokens=await served.texts.encode(request.text, add_special_tokens=special))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        served, _ = self.begin(context, request)
        tokens, skip = list(request.tokens), request.skip_special_tokens
        return pb.DetokenizeResponse(text=await served.texts.decode(tokens, skip_special_tokens=skip))

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        served, _ = self.begin(context, request)
        text, tokens = await served.texts.render(messages(request.messages))
        return pb.ApplyChatTemplateResponse(text=text, tokens=tokens)
