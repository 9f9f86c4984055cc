"""The headers of the context cache; test_use.py has those that are refused."""

from __future__ import annotations

from starlette.datastructures import Headers

from jaxctx_server.http.contextcache.headers import SessionHeaders, session_headers


def test_they_are_read() -> None:
    assert session_headers(Headers({})) == SessionHeaders(None, None, "full")
    assert not session_headers(Headers({})).asks_for_a_context
    given = session_headers(Headers({"x-session-id": "session-01", "x-session-ttl": "60", "x-session-mode": "append"}))
    assert given == SessionHeaders("session-01", 60, "append")
    assert session_headers(Headers({"x-session-ttl": "1"})).asks_for_a_context
