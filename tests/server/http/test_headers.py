"""Headers that change what a request means to other servers are refused, by their names."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.headers import UNSUPPORTED_HEADERS, check_headers
from tests.server.http.client import HttpClient


def request(headers: dict[str, str]) -> Request:
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": encoded})


def test_a_request_without_such_headers() -> None:
    check_headers(request({"authorization": "Bearer x", "x-request-id": "1", "x-session": "1", "timeout": "1"}))


def test_the_headers_that_are_refused() -> None:
    """Those of sessions of other servers, of other methods than that of the request, and of gRPC's deadlines."""
    sessions = {"x-session-id", "x-session-ttl", "x-session-mode"}
    methods = {"x-http-method-override", "x-http-method", "x-method-override"}
    assert set(UNSUPPORTED_HEADERS) == sessions | methods | {"grpc-timeout"}


@pytest.mark.parametrize("name", UNSUPPORTED_HEADERS)
@pytest.mark.parametrize("value", ["1", ""])
def test_an_unsupported_header_is_refused_whatever_its_value(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_headers(request({name.title(): value}))
    assert [violation.field for violation in raised.value.violations] == [name]


async def test_it_is_refused_before_the_body_is_read(web: HttpClient) -> None:
    asked = await web("POST", "/v1/session", b"no JSON", headers={"x-http-method": "PUT", "content-type": "text/plain"})
    assert asked.error == (400, "INVALID_FIELD", "x-http-method")


def test_a_path_may_read_some_of_them() -> None:
    check_headers(request({"x-session-id": "a"}), ("x-session-id",))
    with pytest.raises(InvalidArgument):
        check_headers(request({"x-session-id": "a", "x-session-ttl": "1"}), ("x-session-id",))


def test_a_session_of_the_client_itself_is_no_context() -> None:
    """As opencode sends it, on every path."""
    check_headers(request({"x-session-id": "ses_1", "x-session-affinity": "ses_1"}))
    for further in ({"x-session-affinity": "another"}, {"x-session-ttl": "60"}, {"x-session-mode": "append"}):
        with pytest.raises(InvalidArgument):
            check_headers(request({"x-session-id": "ses_1", "x-session-affinity": "ses_1", **further}))


async def test_messages_take_the_session_of_a_client(web: HttpClient) -> None:
    body = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": "?"}]}
    headers = {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}
    assert (await web("POST", "/v1/messages/count_tokens", body, headers=headers)).status == 200
