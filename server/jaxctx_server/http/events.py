"""Server-sent events."""

from typing import Any

from jaxctx_server.http.errors import json_text

DONE = "data: [DONE]\n\n"  # the last event of a stream of the OpenAI API


def data_event(body: Any) -> str:
    """An event without a type, with JSON as its data."""
    return f"data: {json_text(body)}\n\n"


def typed_event(event_type: str, body: Any) -> str:
    """An event of a type, with JSON as its data."""
    return f"event: {event_type}\ndata: {json_text(body)}\n\n"
