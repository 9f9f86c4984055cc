"""What holds for all paths: the name of the host, headers, defects, and a server that loads."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from jaxctx_server.http.app import HttpAccess
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient, http_server


@pytest.mark.parametrize("name", ["x-session-id", "X-Session-TTL", "x-session-mode", "x-http-method-override"])
async def test_a_header_that_would_mean_something_elsewhere(web: HttpClient, name: str) -> None:
    for method, path, body in (
        ("GET", "/v1/session", None),
        ("POST", "/v1/session", {"session_id": "x"}),
        ("GET", "/v1/session/x/graph.svg", None),
    ):
        asked = await web(method, path, body, headers={name: "1"})
        assert asked.error == (400, "INVALID_FIELD", name.lower())
    assert (await web("GET", "/v1/session")).json["sessions"] == []


async def test_a_defect_is_json(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "path_params", property(lambda self: 1 / 0))
    assert (await web("GET", "/v1/session/x")).error == (500, "INTERNAL", None)


async def test_another_name_of_the_host(web: HttpClient) -> None:
    other = await web("GET", "/v1/session", headers={"host": f"elsewhere.example:{web.port}"})
    assert other.error == (400, "HTTP", None)
    assert (await web("GET", "/", headers={"host": f"localhost:{web.port}"})).status == 200


async def test_a_server_that_allows_other_names(backend: Backend) -> None:
    async with http_server(backend, HttpAccess(allowed_hosts=("models.example",))) as web:
        assert (await web("GET", "/health", headers={"host": "models.example"})).status == 200
        assert (await web("GET", "/health", headers={"host": "localhost"})).status == 400
    async with http_server(backend, HttpAccess(allowed_hosts=("*",))) as web:
        assert (await web("GET", "/health", headers={"host": "anything.example:1"})).status == 200


async def test_pages_of_other_origins_may_read_answers_only_if_allowed(backend: Backend) -> None:
    origin = {"origin": "https://page.example"}
    async with http_server(backend) as web:
        assert "access-control-allow-origin" not in (await web("GET", "/health", headers=origin)).headers
    async with http_server(backend, HttpAccess(cors_origins=("https://page.example",))) as web:
        answer = await web("GET", "/health", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = await web("GET", "/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        asked_first = await web(
            "OPTIONS", "/v1/completions", headers={**origin, "access-control-request-method": "POST"}
        )
        assert asked_first.status == 200


async def test_a_server_that_loads() -> None:
    lifecycle = ServerLifecycle()
    async with http_server(Backend.make(lifecycle, None, max_calls=4)) as web:
        assert (await web("GET", "/livez")).json == {"status": "alive", "state": "loading"}
        for path in ("/health", "/readyz", "/v1/session"):
            assert (await web("GET", path)).error == (503, "NOT_SERVING", None)
    lifecycle.stop()
