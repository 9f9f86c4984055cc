"""Headers that change what a request means to other servers, and that are therefore refused rather than ignored."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxctx.errors import InvalidArgument

UNSUPPORTED_HEADERS = (
    "x-session-id",
    "x-session-ttl",
    "x-session-mode",
    "x-http-method-override",
    "x-http-method",
    "x-method-override",
    "grpc-timeout",
)

Handler = Callable[[Request], Awaitable[Response]]


def api_route(path: str, handler: Handler, methods: Sequence[str] = ("GET",)) -> Route:
    """A route that refuses unsupported headers before its handler sees the request."""
    return Route(path, handler, methods=list(methods), middleware=[Middleware(HeaderCheck)])


class HeaderCheck:
    """Middleware that raises InvalidArgument for an unsupported header, with its name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Request(scope).headers
        for name in UNSUPPORTED_HEADERS:
            if name in headers:
                raise InvalidArgument.field(name, "is a header that is not supported here")
        await self._app(scope, receive, send)
