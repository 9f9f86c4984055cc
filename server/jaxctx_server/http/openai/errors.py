"""Errors of the services in the names that the OpenAI API has for its fields."""

import re
from collections.abc import Mapping

from jaxctx.errors import FieldViolation, JaxctxError
from jaxctx_server.http.field_names import request_name

PROMPT_FIELD = re.compile(r"(text|tokens)\b")


def with_openai_names(error: JaxctxError, field_names: Mapping[str, str]) -> JaxctxError:
    """The same error, with its fields named as the request named them. `field_names`: those of this API, by the names
    of the contract.
    """
    if error.violations:
        error.violations = tuple(
            FieldViolation(openai_name(violation.field, field_names), violation.description)
            for violation in error.violations
        )
        error.message = "; ".join(f"{violation.field}: {violation.description}" for violation in error.violations)
    elif error.reason == "MODEL_NOT_FOUND":
        error.violations = (FieldViolation("model", "is not a model of this server"),)
    return error


def openai_name(path: str, field_names: Mapping[str, str]) -> str:
    """The name in this API of a field of the contract."""
    if PROMPT_FIELD.match(path):
        return "prompt"
    if path.startswith("output_format"):
        return field_names.get("output_format", path)
    return request_name(path, field_names)
