"""Names of fields in errors: as the request named them, not as the contract does."""

from collections.abc import Mapping

from jaxctx.errors import FieldViolation, JaxctxError

WHOLE_FIELDS = frozenset(("text", "tokens", "output_format"))
"""Fields of the contract that an API has in another form: an error within one of them names the API's field alone."""


def renamed(error: JaxctxError, names: Mapping[str, str]) -> JaxctxError:
    """The same error, with its fields named as the request named them. `names`: those, by the names of the contract."""
    if error.violations:
        error.violations = tuple(
            FieldViolation(request_name(violation.field, names), violation.description)
            for violation in error.violations
        )
        error.message = "; ".join(f"{violation.field}: {violation.description}" for violation in error.violations)
    elif error.reason == "MODEL_NOT_FOUND":
        description = "is not a model of this server"
        error.violations = (FieldViolation("model", description),)
    return error


def request_name(path: str, names: Mapping[str, str]) -> str:
    """The name in a request of a field of the contract."""
    path = path.removeprefix("sampling.").removeprefix("messages.")
    first, dot, rest = path.partition(".")
    base, bracket, index = first.partition("[")
    if base in WHOLE_FIELDS and base in names:
        return names[base]
    return f"{names.get(base, base)}{bracket}{index}{dot}{rest}"
