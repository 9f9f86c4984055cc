"""ModelService: the served model, its tokenizer and its chat template."""

from jaxctx_server.grpc.service import Service, answered
from jaxctx_server.validate.requests import made


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
