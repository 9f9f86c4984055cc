"""The path of decisions."""

from starlette.routing import Route

from jaxctx_server.http.decisions.create import create_decision
from jaxctx_server.http.endpoint import CHAT, api_route

GENERATE = "/jaxctx.v1.ContextService/Generate"


def decision_routes() -> list[Route]:
    """The path of decisions."""
    return [api_route("/v1/decisions", create_decision, ["POST"], method=GENERATE, operation=CHAT)]
