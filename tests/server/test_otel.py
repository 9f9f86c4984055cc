"""Spans of calls: what they say, whose children they are, and what they never hold."""

from __future__ import annotations

import sys
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxctx.errors import ResourceExhausted
from jaxctx.model.text import ModelText
from jaxctx.v1 import admin_service_pb2
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceStub
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx_server.call_record import CallRecord
from jaxctx_server.config import ServeConfig
from jaxctx_server.errors import StartError
from jaxctx_server.grpc.server import make_server
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.otel import OtelTracer, otlp_tracer
from jaxctx_server.server import make_tracer
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.server.collector import running_collector
from tests.server.fake_engine import FakeEngine
from tests.server.harness import KEYS, bearer, failure

GENERATE = "/jaxctx.v1.ContextService/Generate"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """A tracer whose spans a test reads."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(SimpleSpanProcessor(self._exporter), "127.0.0.1", {"grpc": 50051})

    def take(self) -> list[ReadableSpan]:
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return spans


@pytest.fixture
def spans() -> Spans:
    return Spans()


def start(spans: Spans, method: str = GENERATE, **fields: Any) -> Any:
    settings: dict[str, Any] = {"transport": "grpc", "operation": None, "traceparent": None, "request_id": "r"} | fields
    return spans.tracer.start(method, **settings)


def test_a_generation_has_the_model_and_its_tokens(spans: Spans) -> None:
    record = CallRecord()
    record.add_tokens(7)
    record.add_output("stop", prompt_tokens=20, computed_tokens=4)
    record.model_id = "llama"
    start(spans).end(record, "OK", None)
    (span,) = spans.take()
    assert (span.name, span.kind) == ("text_completion llama", SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": "jaxctx.v1.ContextService",
        "rpc.method": "Generate",
        "rpc.response.status_code": "OK",
        "network.protocol.name": "grpc",
        "server.address": "127.0.0.1",
        "server.port": 50051,
        "jaxctx.request_id": "r",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxctx",
        "gen_ai.request.model": "llama",
        "gen_ai.response.model": "llama",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert span.resource.attributes["service.name"] == "jaxctx"


def test_another_transport_says_what_it_does(spans: Spans) -> None:
    start(spans, transport="http", operation="chat").end(CallRecord(model_id="m"), "OK", None)
    (span,) = spans.take()
    attributes = span.attributes or {}
    assert span.name == "chat m"
    assert attributes["network.protocol.name"] == "http"
    assert attributes.keys().isdisjoint({"rpc.system", "server.port"})


@pytest.mark.parametrize(
    ("code", "status"),
    [("NOT_FOUND", StatusCode.UNSET), ("CANCELLED", StatusCode.UNSET), ("INTERNAL", StatusCode.ERROR)],
)
def test_only_a_servers_failure_is_an_error_of_the_span(spans: Spans, code: str, status: StatusCode) -> None:
    start(spans, "/jaxctx.v1.ContextService/Fill").end(CallRecord(), code, "A_REASON")
    (span,) = spans.take()
    attributes = span.attributes or {}
    assert (attributes["error.type"], attributes["jaxctx.error.reason"]) == (code, "A_REASON")
    assert (span.status.status_code, span.status.description) == (status, None)
    assert not [name for name in attributes if name.startswith("gen_ai.")]


def test_the_callers_trace_goes_on_in_the_span_and_from_it(spans: Spans) -> None:
    span = start(spans, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert span.traceparent.startswith(f"00-{TRACE}-")
    assert PARENT not in span.traceparent
    span.end(CallRecord(), "OK", None)
    (ended,) = spans.take()
    assert ended.parent is not None
    assert f"{ended.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize("wrong", ["", "00", f"00-{TRACE}", "x" * 5000, f"ff-{TRACE}-{PARENT}-01"])
def test_a_trace_context_that_is_none_begins_a_new_trace(spans: Spans, wrong: str) -> None:
    start(spans, traceparent=wrong).end(CallRecord(), "OK", None)
    (span,) = spans.take()
    assert span.parent is None


def test_a_caller_that_samples_nothing_is_obeyed(spans: Spans) -> None:
    start(spans, traceparent=f"00-{TRACE}-{PARENT}-00").end(CallRecord(), "OK", None)
    assert spans.take() == []


async def test_calls_of_a_server(spans: Spans, text: ModelText, limits: Limits) -> None:
    """Each authorised call is a span, which holds nothing of what was said; probes and heartbeats are none."""
    lifecycle, engine = ServerLifecycle(), FakeEngine()
    backend = Backend.make(lifecycle, KEYS, max_calls=10, clock=lambda: 1000.0, tracer=spans.tracer)
    server = make_server(backend)
    port = server.add_insecure_port("127.0.0.1:0")
    lifecycle.set_ready(ServingState.of(engine, text, limits))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub, admin = ContextServiceStub(channel), AdminServiceStub(channel)
            headers = (*bearer("a-key"), ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "mine"))
            await stub.CreateContext(pb.CreateContextRequest(context_id="c"), metadata=headers)
            await stub.Fill(pb.FillRequest(context_id="c", text="marker"), metadata=headers)
            assert [part async for part in stub.Generate(pb.GenerateRequest(context_id="c"), metadata=headers)]
            engine.error = ResourceExhausted("marker", reason="OUT_OF_PAGES")
            await failure(stub.Flush(pb.FlushRequest(context_id="c"), metadata=headers))
            await failure(stub.Flush(pb.FlushRequest(context_id="c"), metadata=bearer("unknown")))
            await admin.GetStats(admin_service_pb2.GetStatsRequest(), metadata=bearer("r-key"))
    finally:
        lifecycle.stop()
        await server.stop(0)
    found = spans.take()
    service = "jaxctx.v1.ContextService"
    names = [span.name for span in found]
    assert names == [f"{service}/CreateContext", f"{service}/Fill", "text_completion fake", f"{service}/Flush"]
    assert {f"{span.context.trace_id:032x}" for span in found if span.context} == {TRACE}
    generation, flush = (span.attributes or {} for span in found[2:])
    assert generation["gen_ai.usage.output_tokens"] == 2
    assert generation["gen_ai.response.finish_reasons"] == ("length",)
    assert generation["jaxctx.request_id"] == "mine"
    assert flush["jaxctx.error.reason"] == "OUT_OF_PAGES"
    assert "marker" not in str([span.to_json() for span in found])
    assert "alice" not in str([span.to_json() for span in found])
    (_, caller, _) = engine.calls[-1]
    assert caller.traceparent.startswith(f"00-{TRACE}-")
    assert PARENT not in caller.traceparent


def test_spans_go_to_the_endpoint_when_the_tracer_is_closed() -> None:
    with running_collector() as collector:
        tracer = otlp_tracer(collector.url, "127.0.0.1", {})
        start_in(tracer).end(CallRecord(), "OK", None)
        tracer.close()
    assert [path for path, _ in collector.posted] == ["/v1/traces"]
    assert collector.span_names == ["jaxctx.v1.ContextService/Generate"]


def test_an_endpoint_keeps_its_path() -> None:
    with running_collector() as collector:
        tracer = otlp_tracer(f"{collector.url}/elsewhere", "127.0.0.1", {})
        start_in(tracer).end(CallRecord(), "OK", None)
        tracer.close()
    assert [path for path, _ in collector.posted] == ["/elsewhere"]


def start_in(tracer: OtelTracer) -> Any:
    return tracer.start(GENERATE, transport="grpc", operation=None, traceparent=None, request_id="r")


@pytest.mark.parametrize("wrong", ["127.0.0.1:4318", "grpc://host", "http://", "x"])
def test_an_endpoint_must_be_a_url(wrong: str) -> None:
    with pytest.raises(StartError, match="--otlp-endpoint"):
        make_tracer(ServeConfig(otlp_endpoint=wrong))


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert make_tracer(ServeConfig()) is None


def test_without_opentelemetry_the_setting_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxctx_server.otel", None)
    with pytest.raises(StartError, match=r"jaxctx\[otel\]"):
        make_tracer(ServeConfig(otlp_endpoint="http://127.0.0.1:4318"))
