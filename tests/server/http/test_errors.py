"""Errors as HTTP responses."""

from __future__ import annotations

import json

import pytest

from jaxctx import errors
from jaxctx_server.http.errors import OPENAI_ERRORS, HttpError, error_type, http_status, json_text


def test_who_may_wait_is_told_how_long() -> None:
    response = OPENAI_ERRORS.response(errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.2))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidArgument("wrong"), 400, "invalid_request_error"),
        (errors.Unauthenticated("who"), 401, "authentication_error"),
        (errors.PermissionDenied("no"), 403, "permission_error"),
        (errors.NotFound("none"), 404, "not_found_error"),
        (errors.Aborted("busy"), 409, "conflict_error"),
        (errors.FailedPrecondition("other", reason="MODEL_MISMATCH"), 409, "conflict_error"),
        (HttpError(413, "large"), 413, "request_too_large"),
        (errors.ResourceExhausted("full"), 429, "rate_limit_error"),
        (errors.ResourceExhausted("never", reason="GRAMMAR_LIMIT"), 400, "invalid_request_error"),
        (errors.Internal("defect"), 500, "api_error"),
        (errors.Unavailable("loading"), 503, "overloaded_error"),
        (errors.DeadlineExceeded("late"), 504, "timeout_error"),
    ],
)
def test_the_status_and_type_of_an_error(error: errors.JaxctxError, status: int, kind: str) -> None:
    assert (http_status(error), error_type(error)) == (status, kind)


def test_an_error_names_its_field() -> None:
    error = errors.InvalidArgument.field("n", "must be 1..128")
    body = {"error": {"message": "n: must be 1..128", "type": "invalid_request_error", "code": "INVALID_FIELD"}}
    assert OPENAI_ERRORS.body(error) == {"error": {**body["error"], "param": "n"}}
    assert OPENAI_ERRORS.event(error, 3) == f"data: {json_text(OPENAI_ERRORS.body(error))}\n\n"


def test_json_of_a_text_that_utf_8_has_not() -> None:
    assert json_text("é") == '"é"'
    assert json.loads(json_text("\ud800é").encode()) == "\ud800é"
