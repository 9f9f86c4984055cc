"""Fields in errors: as a request named them, whichever API it is of."""

from __future__ import annotations

import pytest

from jaxctx.errors import FieldViolation, InvalidArgument, NotFound
from jaxctx_server.http.field_names import renamed, request_name

NAMES = {
    "salt": "cache_salt",
    "stop": "stop_sequences",
    "tokens": "prompt",
    "text": "prompt",
    "output_format": "response_format",
    "tools": "functions",
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("salt", "cache_salt"),
        ("stop[3]", "stop_sequences[3]"),
        ("n", "n"),
        ("sampling.top_p", "top_p"),
        ("sampling.logit_bias[7]", "logit_bias[7]"),
        ("messages.tools[2].function.name", "functions[2].function.name"),
        ("messages.messages[0].role", "messages[0].role"),
        # What a request has in another form is named without what is inside of it.
        ("tokens", "prompt"),
        ("tokens.ids[5]", "prompt"),
        ("text", "prompt"),
        ("output_format.choices.texts[1]", "response_format"),
        # Names that only begin like those.
        ("textual", "textual"),
        ("stop_token_ids[1]", "stop_token_ids[1]"),
    ],
)
def test_a_name(path: str, name: str) -> None:
    assert request_name(path, NAMES) == name


def test_a_field_of_which_no_name_is_known_keeps_its_path() -> None:
    assert request_name("output_format.choices.texts[1]", {}) == "output_format.choices.texts[1]"


def test_the_message_says_it_in_the_same_words() -> None:
    violations = (FieldViolation("salt", "is long"), FieldViolation("sampling.top_p", "must be 1"))
    error = renamed(InvalidArgument("salt: is long; sampling.top_p: must be 1", violations=violations), NAMES)
    assert [each.field for each in error.violations] == ["cache_salt", "top_p"]
    assert error.message == "cache_salt: is long; top_p: must be 1"


def test_a_model_that_is_not_served_is_the_field_model() -> None:
    error = renamed(NotFound("no such model", reason="MODEL_NOT_FOUND"), NAMES)
    assert [each.field for each in error.violations] == ["model"]
    assert not renamed(NotFound("no such context", reason="CONTEXT_NOT_FOUND"), NAMES).violations
