"""Traces of calls over HTTP: what a route does is the operation of its span."""

from __future__ import annotations

import pytest

from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient
from tests.server.test_otel import PARENT, TRACE, Spans

CHAT = {"messages": [{"role": "user", "content": "marker"}], "max_tokens": 3}


@pytest.fixture
def spans(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Those of the server."""
    spans = Spans()
    monkeypatch.setattr(backend.pipeline, "_tracer", spans.tracer)
    return spans


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "marker", "max_tokens": 3}, "text_completion"),
        ("/v1/chat/completions", CHAT, "chat"),
        ("/v1/messages", CHAT, "chat"),
        ("/v1/responses", {"input": "marker", "max_output_tokens": 16}, "chat"),
    ],
)
async def test_a_generation(web: HttpClient, spans: Spans, path: str, body: object, operation: str) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    answer = await web("POST", path, body, headers=headers)
    assert answer.status == 200, answer.text
    (span,) = spans.take()
    attributes = dict(span.attributes or {})
    assert span.name == f"{operation} {attributes['gen_ai.request.model']}"
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["gen_ai.provider.name"] == "jaxctx"
    assert attributes["gen_ai.usage.output_tokens"]
    assert attributes["gen_ai.usage.input_tokens"]
    assert attributes["network.protocol.name"] == "http"
    assert attributes["jaxctx.request_id"] == "mine"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert "marker" not in span.to_json()


async def test_what_is_refused_and_what_only_looks(web: HttpClient, spans: Spans) -> None:
    assert (await web("POST", "/v1/chat/completions", {**CHAT, "temperature": "marker"})).status == 400
    for path in ("/health", "/metrics", "/", "/openapi.json"):
        assert (await web("GET", path)).status == 200
    (span,) = spans.take()
    attributes = dict(span.attributes or {})
    assert (span.name, attributes["gen_ai.operation.name"]) == ("jaxctx.v1.ContextService/Generate", "chat")
    assert attributes["jaxctx.error.reason"] == "INVALID_FIELD"
    assert "marker" not in span.to_json()
