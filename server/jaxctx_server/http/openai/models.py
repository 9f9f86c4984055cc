"""GET /v1/models and /v1/models/ID, which OpenAI clients and clients of the contract share.

Answers have the fields of both: OpenAI's (`data`; `id`, `object`, …) and the contract's (`models`, `next_page_token`;
`model`). Either kind of client ignores the fields of the other.
"""

from typing import Any

from starlette.responses import JSONResponse, Response

from jaxctx.errors import JaxctxError
from jaxctx.v1.model_service_pb2 import GetModelRequest, ListModelsRequest, Model
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.messages import fill_message, message_fields

MODELS_PER_PAGE = 1000  # without `limit`: OpenAI's API has no pages here


async def list_models(call: HttpCall) -> Response:
    """GET /v1/models: all models, or a page of them by `limit` and `page_token`."""
    page = {
        name: call.request.query_params[name] for name in ("limit", "page_token") if name in call.request.query_params
    }
    message = fill_message(ListModelsRequest(limit=MODELS_PER_PAGE), page)
    response = await call.unary(call.services.models.list_models, message)
    models = [openai_model(model) for model in response.models]
    return JSONResponse({"object": "list", "data": models, **message_fields(response)})


async def get_model(call: HttpCall) -> Response:
    """GET /v1/models/ID."""
    message = fill_message(GetModelRequest(), {"model_id": call.request.path_params["model_id"]})
    try:
        response = await call.unary(call.services.models.get_model, message)
    except JaxctxError as error:
        raise renamed(error, {"model_id": "model"}) from None
    return JSONResponse({**openai_model(response.model), **message_fields(response)})


def openai_model(model: Model) -> dict[str, Any]:
    """A model as OpenAI's API has it; its longest context and an adapter's model as other servers name them."""
    fields = {
        "id": model.model_id,
        "object": "model",
        "created": 0,
        "owned_by": "jaxctx",
        "max_model_len": model.max_context_tokens,
    }
    return {**fields, "parent": model.parent_model_id, "root": model.model_id} if model.parent_model_id else fields
