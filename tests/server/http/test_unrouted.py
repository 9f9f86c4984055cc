"""What no route handles: paths that are not there, methods that a path lacks, OPTIONS."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from jaxctx_server.http.ops.unsupported import UNSUPPORTED, why_unsupported
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient, http_server


@pytest.fixture
async def web() -> AsyncIterator[HttpClient]:
    """A server that loads: none of these requests gets as far as a service."""
    lifecycle = ServerLifecycle()
    async with http_server(Backend.make(lifecycle, None, max_calls=4)) as web:
        yield web
    lifecycle.stop()


async def test_an_unknown_path(web: HttpClient) -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        answer = await web(method, "/v2/unknown")
        assert answer.error == (404, "HTTP", None)
        assert answer.json["error"]["message"] == "there is no such path"
        assert answer.json["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", sorted(UNSUPPORTED))
async def test_a_path_of_other_servers_says_that_it_is_not_supported(web: HttpClient, path: str) -> None:
    for asked in (path, f"{path}/more"):
        answer = await web("POST", asked, {"model": "x", "input": "text"})
        assert answer.error == (404, "HTTP", None)
        assert answer.json["error"]["message"] == UNSUPPORTED[path]


def test_only_whole_parts_of_a_path_count() -> None:
    assert why_unsupported("/v1/embeddings/") == why_unsupported("/v1/embeddings")
    assert why_unsupported("/v1/embeddingsmore") is None
    assert why_unsupported("/v1") is None
    assert why_unsupported("/") is None


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/session", "GET, HEAD, OPTIONS, POST"),  # of both of its routes
        ("POST", "/v1/session/x", "DELETE, GET, HEAD, OPTIONS"),
        ("GET", "/tokenize", "OPTIONS, POST"),
        ("DELETE", "/health", "GET, HEAD, OPTIONS"),
        ("PATCH", "/", "GET, HEAD, OPTIONS"),
        ("TRACE", "/v1/models/some/model", "GET, HEAD, OPTIONS"),
        ("PATCH", "/v1/responses/input_tokens", "OPTIONS, POST"),  # not those of /v1/responses/{response_id}
    ],
)
async def test_a_method_that_the_path_lacks(web: HttpClient, method: str, path: str, allowed: str) -> None:
    answer = await web(method, path)
    assert answer.error == (405, "HTTP", None)
    assert answer.headers["allow"] == allowed
    assert answer.json["error"]["message"] == f"this path has the methods {allowed}"


async def test_head_of_a_path_that_has_no_get(web: HttpClient) -> None:
    answer = await web("HEAD", "/tokenize")
    assert (answer.status, answer.text, answer.headers["allow"]) == (405, "", "OPTIONS, POST")


async def test_options_says_which_methods_there_are(web: HttpClient) -> None:
    answer = await web("OPTIONS", "/v1/semantic_var")
    assert (answer.status, answer.text) == (200, "")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS, POST"


async def test_the_document_is_the_one_of_the_application(web: HttpClient) -> None:
    answer = await web("GET", "/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["openapi"] == "3.1.0"
    assert "/v1/session" in answer.json["paths"]
