"""An error as the last event of a stream of responses."""

from __future__ import annotations

import json

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.openai.responses.errors import RESPONSES_ERRORS


def test_an_error_behind_other_events() -> None:
    error = InvalidArgument.field("input", "is wrong")
    kind, data, *rest = RESPONSES_ERRORS.event(error, 7).split("\n")
    assert (kind, rest) == ("event: error", ["", ""])
    told = json.loads(data.removeprefix("data: "))
    top = {"code": "INVALID_FIELD", "message": "input: is wrong", "param": "input"}
    assert told == {
        "type": "error",
        **top,
        "sequence_number": 7,
        "error": {**top, "type": "invalid_request_error"},
    }
