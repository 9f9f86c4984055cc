"""The paths of the OpenAI API."""

from starlette.routing import Route

from jaxctx_server.http.headers import api_route
from jaxctx_server.http.openai.chat import chat_completions
from jaxctx_server.http.openai.completions import completions
from jaxctx_server.http.openai.models import get_model, list_models


def openai_routes() -> list[Route]:
    """All paths of the OpenAI API."""
    return [
        api_route("/v1/completions", completions, ["POST"]),
        api_route("/v1/chat/completions", chat_completions, ["POST"]),
        api_route("/v1/models", list_models),
        api_route("/v1/models/", list_models),
        api_route("/v1/models/{model_id:path}", get_model),  # ids may have slashes
    ]
