"""Every refusal where waiting helps says after how long: the contract's table, and every place that raises one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxctx import errors
from jaxctx.cache.page_pool import OutOfPages

ROOT = Path(__file__).parents[2]
PROTO = (ROOT / "protos/jaxctx/v1/error_reason.proto").read_text()
CLASSES = {"Aborted": "ABORTED", "ResourceExhausted": "RESOURCE_EXHAUSTED", "Unavailable": "UNAVAILABLE"}


def table() -> dict[str, tuple[str, str]]:
    """By reason: its status, and what its comment says after "RetryInfo:"; "" if it says nothing."""
    found = {}
    for comment, reason in re.findall(r"((?:  //.*\n)+)  ERROR_REASON_(\w+) = \d+;", PROTO):
        words = " ".join(comment.replace("//", " ").split())
        said = re.search(r"RetryInfo: (\w+)", words)
        found[reason] = words.partition(":")[0], said[1] if said else ""
    return found


TABLE = table()
# Codes of the context cache over HTTP, which are no reasons of the contract (docs/http.md).
HTTP_CODES = {"context_busy": ("ABORTED", "yes"), "model_mismatch": ("ABORTED", "no")}


def raises() -> Iterator[tuple[str, str, str, bool]]:
    """Each place that makes such an error: where, its class, its reason, and whether it may have a retry time."""
    for folder in ("jaxctx", "server/jaxctx_server", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "jaxctx/v1"):
                continue
            source = path.read_text()
            if not any(name in source for name in CLASSES):
                continue
            for node in ast.walk(ast.parse(source)):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                if called == "partial" and node.args:
                    called = ast.unparse(node.args[0])
                name = called.removeprefix("errors.").removeprefix("jaxctx.errors.")
                if name not in CLASSES:
                    continue
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                reason = given.get("reason")
                assert reason is None or isinstance(reason, ast.Constant), f"{path}:{node.lineno} hides its reason"
                default = getattr(errors, name).default_reason
                told = default if reason is None else str(reason.value)
                after = given.get("retry_after_s")
                retries = after is not None and not (isinstance(after, ast.Constant) and after.value is None)
                yield f"{path.relative_to(ROOT)}:{node.lineno}", CLASSES[name], told, retries


PLACES = list(raises())


def test_the_table_is_whole() -> None:
    assert {reason.removeprefix("ERROR_REASON_") for reason in re.findall(r"^  (\w+) = \d+;", PROTO, re.M)} == {*TABLE}
    for reason, (status, said) in TABLE.items():
        assert said in ("yes", "no") if status in CLASSES.values() else said == "", reason


def test_what_raises_is_found() -> None:
    assert len(PLACES) > 30
    assert {reason for _, _, reason, _ in PLACES} >= {
        *("STORE_FAILED", "STORE_FULL", "PIN_BUDGET", "QUOTA", "QUEUE_FULL", "ENGINE_FAILED", "DEADLINE_UNREACHABLE"),
    }


@pytest.mark.parametrize(("place", "status", "reason", "retries"), PLACES)
def test_a_refusal_has_a_retry_time_where_the_contract_says_so(
    place: str, status: str, reason: str, retries: bool
) -> None:
    expected_status, waiting_helps = {**TABLE, **HTTP_CODES}[reason]
    assert expected_status == status
    assert retries == (waiting_helps == "yes"), f"{place}: {reason}"


def test_pages_that_are_not_to_be_had_may_be_later() -> None:
    assert OutOfPages("3 pages needed").retry_after_s
