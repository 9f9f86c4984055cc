"""Calls in the metrics: what is counted, and that labels come from closed sets."""

from __future__ import annotations

import time

from jaxctx_server.metrics.calls import CODES, OTHER, REASONS, CallMetrics
from tests.server.metrics.exposition import value, values_of

FILL = "/jaxctx.v1.ContextService/Fill"
NAME = "jaxctx.v1.ContextService/Fill"


def test_a_call_counts_while_it_runs_and_when_it_has_ended() -> None:
    metrics = CallMetrics()
    metrics.began("http")
    running = values_of(metrics.families())
    assert value(running, "jaxctx_calls_in_progress", transport="http") == 1
    assert value(running, "jaxctx_calls_in_progress", transport="grpc") == 0
    metrics.ended(FILL, "http", "RESOURCE_EXHAUSTED", "QUEUE_FULL", time.monotonic() - 0.3)
    ended = values_of(metrics.families())
    assert value(ended, "jaxctx_calls_in_progress", transport="http") == 0
    assert value(ended, "jaxctx_calls_total", method=NAME, transport="http", code="RESOURCE_EXHAUSTED") == 1
    assert value(ended, "jaxctx_call_errors_total", reason="QUEUE_FULL") == 1
    seconds = {"method": NAME, "transport": "http"}
    assert value(ended, "jaxctx_call_duration_seconds_bucket", le="0.25", **seconds) == 0
    assert value(ended, "jaxctx_call_duration_seconds_count", **seconds) == 1
    assert 0.3 <= value(ended, "jaxctx_call_duration_seconds_sum", **seconds) < 10


def test_a_call_without_an_error_has_no_reason() -> None:
    metrics = CallMetrics()
    metrics.began("grpc")
    metrics.ended(FILL, "grpc", "OK", None, time.monotonic())
    assert not [name for name, _ in values_of(metrics.families()) if name == "jaxctx_call_errors_total"]


def test_what_is_in_no_closed_set_is_other() -> None:
    metrics = CallMetrics()
    for number in range(50):  # as a hostile caller or an engine of another version would
        metrics.began(f"transport {number}")
        metrics.ended(f"/method {number}", f"transport {number}", f"CODE_{number}", f"REASON_{number}", 0.0)
    values = values_of(metrics.families())
    assert value(values, "jaxctx_calls_total", method=OTHER, transport=OTHER, code=OTHER) == 50
    assert value(values, "jaxctx_call_errors_total", reason=OTHER) == 50
    assert len([name for name, _ in values if name == "jaxctx_calls_total"]) == 1


def test_the_closed_sets_are_those_of_the_contract() -> None:
    assert {"OK", "CANCELLED", "NOT_FOUND", "INTERNAL"} <= CODES
    assert {"QUEUE_FULL", "OUT_OF_PAGES", "CONTEXT_NOT_FOUND"} <= REASONS


def test_reasons_that_http_alone_has() -> None:
    metrics = CallMetrics()
    for reason in ("context_busy", "CONTEXT_BUSY", "context_exists", "HTTP"):
        metrics.began("http")
        metrics.ended(FILL, "http", "ABORTED", reason, 0.0)
    values = values_of(metrics.families())
    assert value(values, "jaxctx_call_errors_total", reason="CONTEXT_BUSY") == 2
    for reason in ("CONTEXT_EXISTS", "HTTP"):
        assert value(values, "jaxctx_call_errors_total", reason=reason) == 1


def test_a_copy_stays_as_it_is() -> None:
    metrics = CallMetrics()
    metrics.began("grpc")
    copied = metrics.copy()
    before = values_of(copied.families())
    metrics.ended(FILL, "grpc", "NOT_FOUND", "CONTEXT_NOT_FOUND", 0.0)
    assert values_of(copied.families()) == before
    assert value(before, "jaxctx_calls_in_progress", transport="grpc") == 1
    assert len(values_of(metrics.copy().families())) > len(before)
