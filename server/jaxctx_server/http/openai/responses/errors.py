"""Errors of the Responses API in a stream: events of the type `error`, numbered as the events before them are."""

from jaxctx.errors import JaxctxError
from jaxctx_server.http.errors import ErrorForm, openai_error_body
from jaxctx_server.http.events import typed_event


def error_event(error: JaxctxError, events_before: int) -> str:
    """An error as the last event of a stream.

    Some clients read its fields at the top, as the API describes them, and others below `error`, as it sends them.
    """
    body = openai_error_body(error)
    fields = {name: body["error"][name] for name in ("code", "message", "param")}
    return typed_event("error", {"type": "error", **fields, "sequence_number": events_before, **body})


RESPONSES_ERRORS = ErrorForm(openai_error_body, error_event)
