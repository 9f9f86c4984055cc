"""Traces by OpenTelemetry, with the GenAI semantic conventions: a span for every call of a caller with access.

Spans are sent in batches, from a thread of OpenTelemetry's, to one address: that of --otlp-endpoint. They have the
method, the model, numbers of tokens, finish reasons, status and reason of an error; never a prompt, an output, a key, a
tenant or an error's message. Needs the extra `otel`; only a server with --otlp-endpoint imports this module.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/, https://opentelemetry.io/docs/specs/semconv/rpc/
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import jaxctx
from jaxctx_server.call_record import CallRecord
from jaxctx_server.errors import StartError

SERVICE = "jaxctx"
TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
# Status codes that are a server's failure. Others are the caller's mistake or wish, which is no error of its span.
SERVER_FAILURES = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
)
OPERATIONS = {"/jaxctx.v1.ContextService/Generate": "text_completion"}  # of methods whose transport names none


class OtelTracer:
    """Implements `jaxctx_server.call_trace.CallTracer`."""

    def __init__(self, processor: SpanProcessor, server_address: str, server_ports: Mapping[str, int]) -> None:
        """`processor` takes the spans; `server_ports` are the ports by transport, 0 and missing ones unknown."""
        resource = Resource.create({"service.name": SERVICE, "service.version": jaxctx.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE, jaxctx.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server_address = server_address
        self._server_ports = server_ports

    def start(
        self, method: str, *, transport: str, operation: str | None, traceparent: str | None, request_id: str
    ) -> "OtelSpan":
        """Begin the span of a call: a child of the caller's, if the caller sent a valid trace context."""
        parent = None if traceparent is None else self._propagator.extract({"traceparent": traceparent})
        service, _, name = method.removeprefix("/").partition("/")
        attributes: dict[str, str | int] = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "network.protocol.name": transport,
            "server.address": self._server_address,
            "jaxctx.request_id": request_id,
        }
        if transport != "grpc":
            del attributes["rpc.system"]
        if self._server_ports.get(transport):
            attributes["server.port"] = self._server_ports[transport]
        operation = operation or OPERATIONS.get(method)
        if operation is not None:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": SERVICE}
        span = self._tracer.start_span(f"{service}/{name}", parent, SpanKind.SERVER, attributes)
        return OtelSpan(span, operation)

    def close(self) -> None:
        """Send what has not been sent, and stop. May take some seconds: call it on a thread of its own."""
        self._provider.shutdown()


class OtelSpan:
    """Implements `jaxctx_server.call_trace.CallSpan`."""

    def __init__(self, span: Span, operation: str | None) -> None:
        """`operation`: gen_ai.operation.name; None: the call is none of a model."""
        self._span = span
        self._operation = operation

    @property
    def traceparent(self) -> str:
        """The trace context for calls that are made on behalf of this one."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, record: CallRecord, code: str, reason: str | None) -> None:
        """End the span."""
        self._span.set_attribute("rpc.response.status_code", code)
        if self._operation is not None:
            self._set_usage(record)
        if code != "OK":
            self._span.set_attribute("error.type", code)
        if reason is not None:
            self._span.set_attribute("jaxctx.error.reason", reason)
        if code in SERVER_FAILURES:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _set_usage(self, record: CallRecord) -> None:
        """The model, and the tokens that are known: a call that was refused has none."""
        if record.model_id:
            self._span.update_name(f"{self._operation} {record.model_id}")
            self._span.set_attribute("gen_ai.request.model", record.model_id)
            self._span.set_attribute("gen_ai.response.model", record.model_id)
        if record.prompt_tokens is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
        if record.cached_tokens is not None:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", record.cached_tokens)
        if record.completion_tokens is not None:
            self._span.set_attribute("gen_ai.usage.output_tokens", record.completion_tokens)
        if record.finish_reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", record.finish_reasons)


def otlp_tracer(endpoint: str, server_address: str, server_ports: Mapping[str, int]) -> OtelTracer:
    """A tracer that sends its spans to a collector by OTLP over HTTP. An `endpoint` without a path gets /v1/traces.

    Raises StartError for an endpoint that is no URL.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise StartError("--otlp-endpoint: must be a URL such as http://127.0.0.1:4318")
    if url.path in ("", "/"):
        endpoint = url._replace(path=TRACES_PATH).geturl()
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    return OtelTracer(BatchSpanProcessor(exporter), server_address, server_ports)
