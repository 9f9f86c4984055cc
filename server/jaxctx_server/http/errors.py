"""Errors as HTTP responses, in the form of each API.

    OpenAI:    {"error": {"message", "type", "code", "param"}}
    Anthropic: {"type": "error", "error": {"type", "message", ...}}

The status follows from the error's gRPC status. Errors keep their reason (`ErrorReason`) as `code` and the name of the
first wrong field as `param`. Errors of HTTP itself (an unknown path, a body that is too large) have the code "HTTP".
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument, JaxctxError

JSON_MEDIA_TYPE = "application/json"
HTTP_STATUS = {  # by the name of the gRPC status; 500 for all others
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
STATUS_OF_REASON = {  # where the reason says more than the gRPC status
    "MODEL_MISMATCH": 409,
    "WRONG_ROLE": 404,
    # Clients try again by themselves what has the status 429: here the same would come of it.
    "NEVER_FITS": 400,
    "GRAMMAR_LIMIT": 400,
}
TYPE_OF_STATUS = {  # names that clients of both APIs know
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled",
    503: "overloaded_error",
    504: "timeout_error",
}
HTTP_REASON = "HTTP"
# Made once: `json.dumps` makes one for each call.
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"))


class HttpError(InvalidArgument):
    """A request that is refused for what HTTP itself says of it, with a status that no status of gRPC stands for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, reason=HTTP_REASON)
        self.status = status


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form that errors have in one API."""

    body: Callable[[JaxctxError], dict[str, Any]]  # what the JSON of an error holds
    event: Callable[[JaxctxError, int], str]  # an error as the last server-sent event of a stream, behind so many
    request_id_headers: tuple[str, ...] = ("x-request-id",)

    def response(self, error: JaxctxError) -> Response:
        """The response for an error, with `retry-after` in whole seconds if the error names a time."""
        headers = {} if error.retry_after_s is None else {"retry-after": str(math.ceil(error.retry_after_s))}
        return Response(json_text(self.body(error)), http_status(error), headers, JSON_MEDIA_TYPE)


def http_status(error: JaxctxError) -> int:
    """The HTTP status for an error."""
    if isinstance(error, HttpError):
        return error.status
    return STATUS_OF_REASON.get(error.reason, HTTP_STATUS.get(error.code, 500))


def error_type(error: JaxctxError) -> str:
    """The kind of an error, by the names that the APIs share."""
    return TYPE_OF_STATUS.get(http_status(error), "api_error")


def error_field(error: JaxctxError) -> str | None:
    """The first field that the error names."""
    return error.violations[0].field if error.violations else None


def openai_error_body(error: JaxctxError) -> dict[str, Any]:
    """An error in the form of the OpenAI API."""
    code, field = error.reason, error_field(error)
    return {"error": {"message": error.message, "type": error_type(error), "code": code, "param": field}}


def openai_error_event(error: JaxctxError, _events_before: int) -> str:
    """An error as the last event of a stream of the OpenAI API."""
    return f"data: {json_text(openai_error_body(error))}\n\n"


OPENAI_ERRORS = ErrorForm(openai_error_body, openai_error_event)


def json_text(value: Any) -> str:
    """A value as JSON. Lone surrogates, which UTF-8 has not, are escaped."""
    text = ENCODER.encode(value)
    return text if text.isascii() or is_unicode(text) else ASCII_ENCODER.encode(value)


def json_response(value: Any) -> Response:
    """A response with a value as JSON."""
    return Response(json_text(value), media_type=JSON_MEDIA_TYPE)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def http_error_json(status: int, message: str) -> str:
    """The JSON of an error of HTTP itself, where no request can be parsed."""
    return json_text(openai_error_body(HttpError(status, message)))
