"""Errors in the form of the Anthropic API: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from typing import Any

from jaxctx.errors import JaxctxError
from jaxctx_server.http.errors import ErrorForm, error_field, error_type, http_status
from jaxctx_server.http.events import typed_event

KNOWN_TYPES = frozenset(
    {
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    }
)


def error_body(error: JaxctxError) -> dict[str, Any]:
    """An error in the form of this API. Beyond the API's own, `code` is its reason and `param` the wrong field."""
    kind = error_type(error)
    if kind not in KNOWN_TYPES:
        kind = "invalid_request_error" if http_status(error) < 500 else "api_error"
    fields = {"type": kind, "message": error.message, "code": error.reason, "param": error_field(error)}
    return {"type": "error", "error": fields}


def error_event(error: JaxctxError, _events_before: int) -> str:
    """An error as the last event of a stream."""
    return typed_event("error", error_body(error))


ANTHROPIC_ERRORS = ErrorForm(error_body, error_event, request_id_headers=("request-id", "x-request-id"))
