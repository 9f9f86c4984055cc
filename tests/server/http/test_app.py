"""What holds for all paths: the name of the host, headers, defects, and a gRPC server that is not there."""

from __future__ import annotations

import pytest
from starlette.requests import Request

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


async def test_a_server_that_is_not_there() -> None:
    async with http_server("127.0.0.1:1") as web:
        assert (await web("GET", "/v1/session")).error[0] == 503
