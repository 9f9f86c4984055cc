"""All HTTP paths in one Starlette application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxctx_server.http.backend import connect
from jaxctx_server.http.errors import EXCEPTION_HANDLERS, http_error_response
from jaxctx_server.http.openai.app import openai_routes
from jaxctx_server.http.page.programs import programs_page
from jaxctx_server.http.programs.routes import program_routes

# Another name would be that of a page from elsewhere that had its name resolve to this machine (DNS rebinding).
HOST_NAMES = ("localhost", "127.0.0.1")


def make_app(server: str) -> Starlette:
    """The application in front of a gRPC server, "host:port" or "unix:/path". It connects when it starts."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with connect(server) as app.state.backend:
            yield

    return Starlette(
        routes=[*openai_routes(), *program_routes(), Route("/", programs_page)],
        middleware=[Middleware(HostCheck)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )


class HostCheck:
    """Middleware that refuses requests for another host than this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            host = Request(scope).headers.get("host", "").partition(":")[0]
            if host.lower() not in HOST_NAMES:
                app = http_error_response(400, "the host must be localhost")
        await app(scope, receive, send)
