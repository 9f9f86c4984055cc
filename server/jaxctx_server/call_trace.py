"""What the call pipeline needs of traces. `jaxctx_server.otel` implements it; without it nothing is traced."""

import re
from typing import Protocol

from jaxctx_server.call_record import CallRecord

TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")  # W3C trace context, version 00


class CallSpan(Protocol):
    """The span of one call. It never holds a prompt, an output or a key."""

    @property
    def traceparent(self) -> str:
        """The trace context for calls that are made on behalf of this one."""

    def end(self, record: CallRecord, code: str, reason: str | None) -> None:
        """End the span of a call with this status code and, if there is an error, the reason."""


class CallTracer(Protocol):
    """Makes the spans of calls."""

    def start(
        self, method: str, *, transport: str, operation: str | None, traceparent: str | None, request_id: str
    ) -> CallSpan:
        """Begin the span of a call. `method` is the full name; `operation` is OpenTelemetry's word for what it does
        ("chat"), None: not known, or nothing with a model; `traceparent` is the trace context that the caller sent.
        """
