"""The paths of the Anthropic API."""

from starlette.routing import Route

from jaxctx_server.http.anthropic.count_tokens import count_tokens
from jaxctx_server.http.anthropic.errors import ANTHROPIC_ERRORS
from jaxctx_server.http.anthropic.messages import create_message
from jaxctx_server.http.endpoint import CHAT, api_route

GENERATE = "/jaxctx.v1.ContextService/Generate"
APPLY_CHAT_TEMPLATE = "/jaxctx.v1.ModelService/ApplyChatTemplate"


def anthropic_routes() -> list[Route]:
    """All paths of the Anthropic API."""
    return [
        api_route("/v1/messages", create_message, ["POST"], method=GENERATE, errors=ANTHROPIC_ERRORS, operation=CHAT),
        api_route(
            "/v1/messages/count_tokens",
            count_tokens,
            ["POST"],
            method=APPLY_CHAT_TEMPLATE,
            errors=ANTHROPIC_ERRORS,
        ),
    ]
