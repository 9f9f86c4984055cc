"""/v1/responses over WebSocket: responses one after the other on one connection.

    client: {"type": "response.create", ...}     the fields of POST /v1/responses
    server: {"type": "response.created", ...} …  the events of its stream, a message each
            {"type": "error", "status": 400, "error": {...}}

One field is only here: `stream_id`, which all events of the response bear. Whether a response is streamed is not asked:
it always is.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import http_status, openai_error_body
from jaxctx_server.http.openai.request import parse_object
from jaxctx_server.http.openai.responses.making import response_events
from jaxctx_server.http.openai.responses.request import ResponsesRequest, read_fields

Json = dict[str, Any]
CREATE = "response.create"
MAX_STREAM_ID = 128


@dataclass(frozen=True, slots=True)
class CreateEvent:
    """A message of the client."""

    request: ResponsesRequest
    common_fields: Json  # that all events of the response have


def parse_create_event(data: bytes) -> CreateEvent:
    """The request of a message. Raises InvalidArgument naming the field."""
    fields = parse_object(data)
    if fields.pop("type", None) != CREATE:
        raise InvalidArgument.field("type", f"must be {CREATE}")
    stream_id = fields.pop("stream_id", None)
    if stream_id is not None and not (isinstance(stream_id, str) and 0 < len(stream_id) <= MAX_STREAM_ID):
        raise InvalidArgument.field("stream_id", f"must be a text of 1 to {MAX_STREAM_ID} characters")
    request = read_fields(fields)
    if request.background:
        raise InvalidArgument.field("background", "must not be true over WebSocket")
    return CreateEvent(request, {} if stream_id is None else {"stream_id": stream_id})


async def answer_create_event(call: HttpCall) -> AsyncGenerator[Json, None]:
    """The messages for one message. Raises JaxctxError."""
    event = await call.parse_body(parse_create_event)
    call.frontend.log_unknown_fields(event.request.unknown_fields)
    number = 0
    async with aclosing(response_events(call, event.request)) as events:
        async for each in events:
            yield {**each, "sequence_number": number, **event.common_fields}
            number += 1


def error_event(error: JaxctxError, last: Json | None) -> Json | None:
    """The message for an error. None: the event before, `last`, has told it."""
    if last is not None and last["type"] == "response.failed":
        return None
    return {"type": "error", "status": http_status(error), **openai_error_body(error)}
