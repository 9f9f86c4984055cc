"""The caller of a running method: its tenant and its deadline."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx_server.auth import Key, Role
from jaxctx_server.call_record import CURRENT_RECORD, CallRecord
from jaxctx_server.grpc.caller import CURRENT_KEY, CallerFactory
from jaxctx_server.services import MAX_DEADLINE_S


class CallContext:
    """A call with so many seconds left; None without a deadline."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s


def caller(remaining_s: float | None, tenant: str = "red") -> Caller:
    """The caller of a call that has been admitted for a tenant, at 1000 seconds of the clock."""
    context: Any = CallContext(remaining_s)
    token = CURRENT_KEY.set(Key("alice", b"", tenant, Role.USER))
    try:
        return CallerFactory(lambda: 1000.0).caller(context)
    finally:
        CURRENT_KEY.reset(token)


@pytest.mark.parametrize("tenant", ["", "red"])
def test_the_tenant_is_that_of_the_key(tenant: str) -> None:
    assert caller(1.0, tenant).tenant == tenant


@pytest.mark.parametrize("remaining_s", [0.0, -0.5, 2.5, 1e6])
def test_the_deadline_is_on_the_engines_clock(remaining_s: float) -> None:
    assert caller(remaining_s).deadline == 1000.0 + remaining_s


def test_a_call_without_a_deadline_has_one_all_the_same() -> None:
    assert caller(None).deadline == 1000.0 + MAX_DEADLINE_S


def test_a_call_that_was_not_admitted_has_no_caller() -> None:
    context: Any = CallContext(1.0)
    with pytest.raises(LookupError):
        contextvars.Context().run(CallerFactory(lambda: 1000.0).caller, context)


def test_the_trace_is_that_of_the_running_call() -> None:
    token = CURRENT_RECORD.set(CallRecord(traceparent="a trace"))
    try:
        assert caller(1.0).traceparent == "a trace"
    finally:
        CURRENT_RECORD.reset(token)
    assert caller(1.0).traceparent == ""
