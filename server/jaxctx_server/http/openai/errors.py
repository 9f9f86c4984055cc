"""Errors of the gRPC server in the names that the OpenAI API has for its fields."""

import re
from collections.abc import Mapping

from jaxctx.errors import FieldViolation, JaxctxError

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
    return error


def openai_name(path: str, field_names: Mapping[str, str]) -> str:
    """The name in this API of a field of the contract."""
    if PROMPT_FIELD.match(path):
        return "prompt"
    path = path.removeprefix("sampling.").removeprefix("messages.")
    return field_names.get(path, path)
