"""Headers that change what a request means to other servers are refused, by their names."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.headers import UNSUPPORTED_HEADERS, api_route


class Application:
    """One route, and how often its handler saw a request."""

    def __init__(self) -> None:
        self.handled = 0
        self.app = Starlette(routes=[api_route("/path", self._handle, ["GET", "POST"])])

    async def _handle(self, request: Request) -> Response:
        self.handled += 1
        return PlainTextResponse("here")

    async def ask(self, method: str = "GET", headers: dict[str, str] | None = None) -> str:
        """The body of the response to a request. Raises what the application raises."""
        encoded = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "method": method, "path": "/path", "query_string": b"", "headers": encoded}
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return b"".join(message.get("body", b"") for message in sent).decode()


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_request_without_such_headers_is_handled(application: Application, method: str) -> None:
    headers = {"authorization": "Bearer x", "x-request-id": "1", "x-session": "1", "timeout": "1"}
    assert await application.ask(method, headers) == "here"
    assert application.handled == 1


def test_the_headers_that_are_refused() -> None:
    """Those of sessions of other servers, of other methods than that of the request, and of gRPC's deadlines."""
    sessions = {"x-session-id", "x-session-ttl", "x-session-mode"}
    methods = {"x-http-method-override", "x-http-method", "x-method-override"}
    assert set(UNSUPPORTED_HEADERS) == sessions | methods | {"grpc-timeout"}


@pytest.mark.parametrize("name", UNSUPPORTED_HEADERS)
@pytest.mark.parametrize("value", ["1", ""])
async def test_an_unsupported_header_is_refused_whatever_its_value(
    application: Application, name: str, value: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await application.ask(headers={name.title(): value})
    assert [violation.field for violation in raised.value.violations] == [name]
    assert application.handled == 0


def test_a_route_is_read_unless_it_says_otherwise() -> None:
    async def handler(request: Request) -> Response:
        return Response()

    assert api_route("/path", handler).methods == {"GET", "HEAD"}
    assert api_route("/path", handler, ["PUT"]).methods == {"PUT"}
