"""Requests that no route handles: unknown paths, methods that a path does not have, and defects. All answers are JSON.

unknown path      404, and why, if clients of other servers know the path
unknown method    405, with all methods of the path in the header `allow`
OPTIONS           200 with `allow`. Requests of browsers that ask for other origins end before, in the middleware
"""

from typing import cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ExceptionHandler

from jaxctx.errors import Internal
from jaxctx_server.http.errors import JSON_MEDIA_TYPE, OPENAI_ERRORS, http_error_json
from jaxctx_server.http.ops.unsupported import why_unsupported
from jaxctx_server.http.request_id import request_id_header


async def handle_http_error(request: Request, error: Exception) -> Response:
    """For an error of HTTP itself that Starlette raises: an unknown path, a method that a path does not have."""
    http_error = cast(HTTPException, error)
    message, headers = http_error.detail, dict(http_error.headers or {})
    if http_error.status_code == 404:
        message = why_unsupported(request.url.path) or "there is no such path"
    if http_error.status_code == 405:
        methods = methods_of_path(request)
        headers = {"allow": ", ".join(methods)}
        if request.method == "OPTIONS":
            return Response(status_code=200, headers=headers)
        message = f"this path has the methods {', '.join(methods)}"
    body = http_error_json(http_error.status_code, message)
    return Response(body, http_error.status_code, headers, JSON_MEDIA_TYPE)


def methods_of_path(request: Request) -> list[str]:
    """The methods of the path of a request, and OPTIONS, which every path has.

    A path that is spelled out, as `/v1/responses/input_tokens`, has its own alone, though it is also an id of
    `/v1/responses/{response_id}`.
    """
    matching = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    spelled_out = [route for route in matching if route.path == request.url.path]
    methods = {"OPTIONS"}
    for route in spelled_out or matching:
        methods.update(route.methods or ())
    return sorted(methods)


async def handle_defect(request: Request, error: Exception) -> Response:
    """For an exception outside of every endpoint: a defect. Uvicorn logs its traceback."""
    response = OPENAI_ERRORS.response(Internal("internal error"))
    response.raw_headers.append(request_id_header(request))  # no middleware sees this answer
    return response


EXCEPTION_HANDLERS: dict[type[Exception], ExceptionHandler] = {
    HTTPException: handle_http_error,
    Exception: handle_defect,
}
