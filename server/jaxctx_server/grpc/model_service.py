# ruff: noqa: N802 - gRPC names the methods
"""ModelService over gRPC: models and tokenizers. Each method calls its namesake of the service layer."""

from jaxctx.v1 import model_service_pb2 as pb
from jaxctx.v1.model_service_pb2_grpc import ModelServiceServicer
from jaxctx_server.grpc.caller import CallerFactory, Context
from jaxctx_server.service.interface import ModelService


class ModelServicer(ModelServiceServicer):
    """See the service in protos/jaxctx/v1/model_service.proto."""

    def __init__(self, service: ModelService, callers: CallerFactory) -> None:
        self._service = service
        self._callers = callers

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return await self._service.list_models(self._callers.caller(context), request)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return await self._service.get_model(self._callers.caller(context), request)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return await self._service.tokenize(self._callers.caller(context), request)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        return await self._service.detokenize(self._callers.caller(context), request)

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        return await self._service.apply_chat_template(self._callers.caller(context), request)
