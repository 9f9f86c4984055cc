# ruff: noqa: N802 - gRPC names the methods
"""ModelService: the served model, its tokenizer and its chat template."""

from jaxctx.codec import encode
from jaxctx.v1 import model_service_pb2 as pb
from jaxctx.v1 import model_service_pb2_grpc
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import Service
from jaxctx_server.validate import content, contexts


class ModelService(Service, model_service_pb2_grpc.ModelServiceServicer):
    """See the service in protos/jaxctx/v1/model_service.proto."""

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        served, _, (after, _) = self.begin(context, request, contexts.page)
        models = [encode(info, pb.Model) for info in (served.engine.info,) if info.model_id > after]
        return pb.ListModelsResponse(models=models)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        served, _, model_id = self.begin(context, request, content.model_id)
        served.check_model(model_id)
        return pb.GetModelResponse(model=encode(served.engine.info, pb.Model))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        served, _, (model_id, text, special) = self.begin(context, request, content.tokenize)
        served.check_model(model_id)
        return pb.TokenizeResponse(tokens=await served.texts.encode(text, add_special_tokens=special))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        served, _, (model_id, tokens, skip) = self.begin(context, request, content.detokenize)
        served.check_model(model_id)
        return pb.DetokenizeResponse(text=await served.texts.decode(tokens, skip_special_tokens=skip))

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        served, _, (model_id, messages) = self.begin(context, request, content.apply_chat_template)
        served.check_model(model_id)
        text, tokens = await served.texts.render(messages)
        return pb.ApplyChatTemplateResponse(text=text, tokens=tokens)
