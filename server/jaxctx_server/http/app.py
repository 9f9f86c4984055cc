"""All HTTP paths in one Starlette application."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxctx_server.http.anthropic.app import anthropic_routes
from jaxctx_server.http.contextcache.app import contextcache_routes
from jaxctx_server.http.contextcache.registry import ContextRegistry
from jaxctx_server.http.decisions.app import decision_routes
from jaxctx_server.http.errors import OPENAI_ERRORS, HttpError
from jaxctx_server.http.frontend import Frontend
from jaxctx_server.http.openai.app import openai_routes
from jaxctx_server.http.ops.app import ops_routes
from jaxctx_server.http.page.routes import page_routes
from jaxctx_server.http.programs.routes import program_routes
from jaxctx_server.http.request_id import REQUEST_ID_HEADER, request_id_header
from jaxctx_server.http.unrouted import EXCEPTION_HANDLERS
from jaxctx_server.services import Backend

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
ANY_HOST = ("*",)
# Messages of ASGI with the headers of an answer.
BEGINNINGS = frozenset(("http.response.start", "websocket.http.response.start", "websocket.accept"))


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Which names of the server, and which other origins, a browser may use."""

    allowed_hosts: Sequence[str] = LOOPBACK_NAMES
    """Values of the header `host`, without a port; "*": any. Without keys another name would be that of a page from
    elsewhere that had its name resolve to this machine (DNS rebinding)."""
    cors_origins: Sequence[str] = ()
    """Origins whose pages may read answers, as "https://example.org"."""


def make_app(
    backend: Backend,
    access: HttpAccess | None = None,
    *,
    response_ttl_s: float | None = None,
    wall_time: Callable[[], float] = time.time,
) -> Starlette:
    """The application of a server. `response_ttl_s` is how long responses are kept; None: for ever. `wall_time` is the
    clock that tells when they were made, in seconds since 1970.
    """
    access = access or HttpAccess()
    middleware = [
        Middleware(RequestIds),
        Middleware(HostCheck, allowed_hosts=access.allowed_hosts),
        Middleware(OriginCheck, allowed_origins=access.cors_origins),
    ]
    if access.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "x-session-id", "x-session-cache", "retry-after"],
            )
        )
    app = Starlette(
        routes=[
            *openai_routes(),
            *decision_routes(),
            *anthropic_routes(),
            *contextcache_routes(),
            *program_routes(),
            *ops_routes(),
            *page_routes(),
        ],
        middleware=middleware,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.frontend = Frontend(
        backend=backend,
        response_ttl_s=response_ttl_s,
        wall_time=wall_time,
        kept_contexts=ContextRegistry(wall_time),
    )
    return app


class RequestIds:
    """Middleware that gives a request id to answers that no endpoint made: of unknown paths, other hosts, and so on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] in BEGINNINGS:
                headers = list(message.get("headers", ()))
                if all(name != REQUEST_ID_HEADER for name, _ in headers):
                    headers.append(request_id_header(HTTPConnection(scope)))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


class HostCheck:
    """Middleware that refuses requests for another host than those allowed."""

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in allowed_hosts
        self._allowed = {host.lower() for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] in ("http", "websocket") and not self._any:
            if host_name(HTTPConnection(scope).headers.get("host", "")) not in self._allowed:
                app = OPENAI_ERRORS.response(HttpError(400, "the host is not one of this server's names"))
        await app(scope, receive, send)


class OriginCheck:
    """Middleware that refuses WebSockets of pages of other origins than those allowed and the server's own.

    A browser lets any page open one, and tells only the server where the page is from. Other clients tell no origin.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in allowed_origins
        self._allowed = {origin.lower() for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "websocket" and not self._any:
            headers = HTTPConnection(scope).headers
            scheme = "https" if scope["scheme"] == "wss" else "http"
            own_origin = f"{scheme}://{headers.get('host', '')}".lower()
            if headers.get("origin", own_origin).lower() not in (own_origin, *self._allowed):
                app = OPENAI_ERRORS.response(HttpError(403, "pages of this origin must not connect"))
        await app(scope, receive, send)


def host_name(host: str) -> str:
    """The name in a header `host`, in lower case, without the port. An IPv6 address keeps its brackets."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
