"""The headers of the context cache; test_use.py has those that are refused."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from jaxctx_server.http.contextcache.headers import SessionHeaders, session_headers
from jaxctx_server.http.headers import names_a_session_of_the_client


def test_they_are_read() -> None:
    assert session_headers(Headers({})) == SessionHeaders(None, None, "full")
    assert not session_headers(Headers({})).asks_for_a_context
    given = session_headers(Headers({"x-session-id": "session-01", "x-session-ttl": "60", "x-session-mode": "append"}))
    assert given == SessionHeaders("session-01", 60, "append")
    assert session_headers(Headers({"x-session-ttl": "1"})).asks_for_a_context


@pytest.mark.parametrize(
    ("headers", "is_of_the_client"),
    [
        ({"x-session-id": "ses_1", "x-session-affinity": "ses_1"}, True),
        ({"x-session-id": "not of ours: ü", "x-session-affinity": "not of ours: ü"}, True),
        ({"x-session-id": "ses_1"}, False),
        ({"x-session-affinity": "ses_1"}, False),
        ({"x-session-id": "ses_1", "x-session-affinity": "node-3"}, False),
        ({"x-session-id": "ses_1", "x-session-affinity": "ses_1", "x-session-mode": "full"}, False),
        ({"x-session-id": "ses_1", "x-session-affinity": "ses_1", "x-session-ttl": "60"}, False),
        ({}, False),
    ],
)
def test_a_session_of_the_client_is_no_context(headers: dict[str, str], is_of_the_client: bool) -> None:
    assert names_a_session_of_the_client(Headers(headers)) == is_of_the_client
