"""Every answer has a request id: the one that its request had, or a new one; also where no endpoint answers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.requests import Request

from jaxctx_server.auth import Key
from jaxctx_server.http.app import HttpAccess
from jaxctx_server.http.endpoint import Endpoint
from jaxctx_server.http.request_body import MAX_BODY_BYTES
from jaxctx_server.http.request_id import REQUEST_ID_HEADER, request_id_header
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient, http_server

NEW = re.compile(r"[0-9a-f]{16}")
NO_JSON = {"content-type": "text/plain"}


@pytest.fixture
def keys(two_tenants: list[Key]) -> list[Key]:
    return two_tenants


@pytest.mark.parametrize(
    ("status", "method", "path", "options"),
    [
        (200, "GET", "/health", {}),
        (200, "GET", "/page/static/page.css", {}),
        (200, "GET", "/v1/models", {"key": "alice"}),
        (200, "OPTIONS", "/v1/models", {}),
        (400, "POST", "/v1/completions", {"key": "alice", "body": {"prompt": 1.5}}),
        (401, "GET", "/v1/models", {}),
        (401, "POST", "/v1/messages", {"body": {}, "key": "nobody"}),
        (403, "GET", "/metrics", {"key": "alice"}),
        (404, "GET", "/v1/session/none", {"key": "alice"}),
        (404, "GET", "/none", {}),
        (404, "POST", "/v1/embeddings", {"body": {}}),
        (405, "GET", "/v1/completions", {}),
        (413, "POST", "/v1/completions", {"key": "alice", "body": b" " * (MAX_BODY_BYTES + 1)}),
        (415, "POST", "/v1/completions", {"key": "alice", "body": b"{}", "headers": NO_JSON}),
    ],
)
async def test_every_answer_has_one(
    web: HttpClient, status: int, method: str, path: str, options: dict[str, Any]
) -> None:
    sent = {"x-request-id": "mine.7"}
    for headers, expected in (({}, NEW), (sent, re.compile(r"mine\.7")), ({"x-request-id": "a b"}, NEW)):
        asked = {**options, "headers": {**options.get("headers", {}), **headers}}
        answer = await web(method, path, asked.pop("body", None), **asked)
        assert answer.status == status, answer.text
        assert expected.fullmatch(answer.headers["x-request-id"])
        if path == "/v1/messages":  # the name that clients of this API know
            assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_another_host_and_what_a_browser_asks_first(backend: Backend) -> None:
    access = HttpAccess(allowed_hosts=("here.example",), cors_origins=("https://page.example",))
    async with http_server(backend, access) as web:
        other = await web("GET", "/health")
        assert other.status == 400
        assert NEW.fullmatch(other.headers["x-request-id"])
        headers = {"host": "here.example", "origin": "https://page.example", "access-control-request-method": "POST"}
        preflight = await web("OPTIONS", "/v1/completions", headers=headers)
        assert preflight.status == 200
        assert NEW.fullmatch(preflight.headers["x-request-id"])


async def test_a_server_that_loads_and_one_with_too_many_calls() -> None:
    lifecycle = ServerLifecycle()
    async with http_server(Backend.make(lifecycle, None, max_calls=0)) as web:
        for path, status in (("/readyz", 503), ("/v1/models", 429)):
            answer = await web("GET", path, headers={"x-request-id": "mine"})
            assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")
    lifecycle.stop()


async def test_a_defect_outside_of_endpoints(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*arguments: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Endpoint, "__call__", fail)
    answer = await web("GET", "/health", headers={"x-request-id": "mine"})
    assert answer.error == (500, "INTERNAL", None)
    assert answer.headers["x-request-id"] == "mine"


def test_of_a_request_that_cannot_be_parsed() -> None:
    name, value = request_id_header(None)
    assert name == REQUEST_ID_HEADER
    assert NEW.fullmatch(value.decode())
    request = Request({"type": "http", "headers": [(b"x-request-id", b"mine")]})
    assert request_id_header(request) == (REQUEST_ID_HEADER, b"mine")
