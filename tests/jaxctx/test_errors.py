"""The classes of jaxctx.errors and the reasons of protos/jaxctx/v1/error_reason.proto."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path

import grpc
import pytest

from jaxctx import errors
from jaxctx.v1 import error_reason_pb2

PREFIX = "ERROR_REASON_"
PROTO = Path(__file__).resolve().parents[2] / "protos" / "jaxctx" / "v1" / "error_reason.proto"
# In the text of the proto each reason has a comment that begins with its status: "// NOT_FOUND: the caller has ...".
REASON = re.compile(r"((?:  //[^\n]*\n)+)  ERROR_REASON_(\w+) = \d+;")


def reasons_by_code(source: str) -> dict[str, set[str]]:
    """The reasons of each status, as the text of the proto says."""
    found: dict[str, set[str]] = defaultdict(set)
    for comment, reason in REASON.findall(source):
        if reason != "UNSPECIFIED":
            code = comment.strip().removeprefix("// ").partition(":")[0]
            found[code].add(reason)
    return dict(found)


REASONS = reasons_by_code(PROTO.read_text(encoding="utf-8"))


def test_every_reason_of_the_proto_is_read() -> None:
    listed = {name.removeprefix(PREFIX) for name in error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name} - {
        "UNSPECIFIED"
    }
    assert set().union(*REASONS.values()) == listed


def test_every_status_with_reasons_has_a_class() -> None:
    assert errors.BY_CODE.keys() == REASONS.keys()


@pytest.mark.parametrize("error_class", errors.BY_CODE.values(), ids=lambda each: each.code)
def test_class_equals_proto(error_class: type[errors.JaxctxError]) -> None:
    """Code, name, default reason, and the reasons in the docstring of a class that has several."""
    assert errors.BY_CODE[error_class.code] is error_class
    assert grpc.StatusCode[error_class.code].name == error_class.code
    assert error_class.__name__ == "".join(word.capitalize() for word in error_class.code.split("_"))
    reasons = REASONS[error_class.code]
    assert error_class.default_reason in reasons
    documented = set(re.findall(r"^([A-Z_]+): ", inspect.getdoc(error_class) or "", re.MULTILINE))
    assert documented == (reasons if len(reasons) > 1 else set())


def test_a_reason_that_is_added_is_found() -> None:
    source = PROTO.read_text(encoding="utf-8")
    planted = source.replace(
        "  // NOT_FOUND: the session has no call",
        "  // NOT_FOUND: x.\n  ERROR_REASON_PLANTED = 39;\n  // NOT_FOUND: the",
    )
    assert reasons_by_code(planted)["NOT_FOUND"] == REASONS["NOT_FOUND"] | {"PLANTED"}


def test_violations_name_fields() -> None:
    error = errors.InvalidArgument.field("stop[3]", "empty")
    assert (error.reason, error.message) == ("INVALID_FIELD", "stop[3]: empty")
    assert error.violations == (errors.FieldViolation("stop[3]", "empty"),)


@pytest.mark.parametrize(
    ("error", "is_retryable"),
    [
        (errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=1.0), True),
        (errors.ResourceExhausted("too much", reason="NEVER_FITS"), False),
        (errors.Unavailable("no answer", reason="ENGINE_LOST"), True),
        (errors.DeadlineExceeded("late"), True),
        (errors.Cancelled("cut off"), True),
        (errors.NotFound("no such context"), False),
        (errors.InvalidArgument.field("context_id", "must not be empty"), False),
    ],
    ids=lambda each: each.reason if isinstance(each, errors.JaxctxError) else "",
)
def test_which_calls_may_succeed_later(error: errors.JaxctxError, is_retryable: bool) -> None:
    assert error.is_retryable == is_retryable
