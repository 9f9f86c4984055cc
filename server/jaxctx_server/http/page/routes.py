"""The paths of the page.

Only `/` is in the OpenAPI document: the others are for the page's own scripts, and change with them.
"""

from collections.abc import Sequence

from starlette.routing import Route

from jaxctx_server.http.endpoint import Handler, api_route
from jaxctx_server.http.page.context import close_context, context_text
from jaxctx_server.http.page.events import PageEvents
from jaxctx_server.http.page.prompt import stream_prompt
from jaxctx_server.http.page.shell import page, static_file
from jaxctx_server.http.programs.routes import PROGRAM_ERRORS

HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # no key needed: these hold no data


def page_routes() -> list[Route]:
    """All paths of the page."""
    return [api_route("/", page, method=HEALTH_CHECK), *script_routes()]


def script_routes() -> list[Route]:
    """The paths that only the page's scripts use."""
    routes = [
        api_route("/page/static/{name}", static_file, method=HEALTH_CHECK),
        context_route("/page/events", PageEvents().respond, "WatchContexts"),
        context_route("/page/prompt", stream_prompt, "Generate", ["POST"]),
        context_route("/page/context/{context_id}", context_text, "GetContext"),
        context_route("/page/context/{context_id}", close_context, "CloseContext", ["DELETE"]),
    ]
    for route in routes:
        route.include_in_schema = False
    return routes


def context_route(path: str, handler: Handler, method: str, methods: Sequence[str] = ("GET",)) -> Route:
    """A route that stands for a method of ContextService. An error in a stream is an event of type `error`."""
    return api_route(path, handler, methods, method=f"/jaxctx.v1.ContextService/{method}", errors=PROGRAM_ERRORS)
