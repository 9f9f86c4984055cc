"""The paths of the OpenAI API."""

from starlette.routing import BaseRoute

from jaxctx_server.http.endpoint import CHAT, api_route
from jaxctx_server.http.headers import CONTEXT_CACHE_HEADERS
from jaxctx_server.http.openai.chat import chat_completions
from jaxctx_server.http.openai.completions import completions
from jaxctx_server.http.openai.models import get_model, list_models
from jaxctx_server.http.openai.responses.app import response_routes

GENERATE = "/jaxctx.v1.ContextService/Generate"
LIST_MODELS = "/jaxctx.v1.ModelService/ListModels"
GET_MODEL = "/jaxctx.v1.ModelService/GetModel"


def openai_routes() -> list[BaseRoute]:
    """All paths of the OpenAI API."""
    return [
        api_route("/v1/completions", completions, ["POST"], method=GENERATE, headers=CONTEXT_CACHE_HEADERS),
        api_route(
            "/v1/chat/completions",
            chat_completions,
            ["POST"],
            method=GENERATE,
            headers=CONTEXT_CACHE_HEADERS,
            operation=CHAT,
        ),
        *response_routes(),
        api_route("/v1/models", list_models, method=LIST_MODELS),
        api_route("/v1/models/", list_models, method=LIST_MODELS),
        api_route("/v1/models/{model_id:path}", get_model, method=GET_MODEL),  # ids may have slashes
    ]
