"""Outputs in the metrics: first tokens, the time between tokens, how they end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from jaxctx.v1.context_service_pb2 import GenerateRequest, GenerateResponse
from jaxctx.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Usage
from jaxctx_server.call_record import CURRENT_RECORD, CallRecord
from jaxctx_server.metrics.generations import GenerationMetrics


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The monotonic clock, which the test sets: `clock.now`."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def record() -> Any:
    """The record of a call that came at 100 s, as that of the running task."""
    record = CallRecord(started_at=100.0)
    token = CURRENT_RECORD.set(record)
    yield record
    CURRENT_RECORD.reset(token)


def part(tokens: int, index: int = 0) -> GenerateResponse:
    return GenerateResponse(index=index, token_ids=[7] * tokens)


def last(tokens: int, index: int = 0, finish: Any = FINISH_REASON_STOP) -> GenerateResponse:
    usage = Usage(prompt_tokens=10, cached_tokens=6, computed_tokens=4, completion_tokens=3)
    return GenerateResponse(index=index, token_ids=[7] * tokens, finish=finish, usage=usage)


def test_first_tokens_count_from_the_calls_arrival_and_gaps_by_their_tokens(clock: Any, record: CallRecord) -> None:
    metrics = GenerationMetrics()
    clock.now = 101.0  # reading and validating the request took a second
    with metrics.measure(GenerateRequest()) as measured:
        clock.now = 102.0
        measured.observe(part(1), "m")
        clock.now = 102.5
        measured.observe(part(1), "m")
        clock.now = 104.0
        measured.observe(last(3), "m")
    assert (metrics.first_token.count, metrics.first_token.sum) == (1, 2.0)
    assert (metrics.between_tokens.count, metrics.between_tokens.sum) == (4, 2.0)
    assert ("0.4", 0.0) in metrics.between_tokens.buckets()
    assert ("0.5", 4.0) in metrics.between_tokens.buckets()  # three tokens in 1.5 s are three gaps of 0.5 s
    assert (metrics.duration.count, metrics.duration.sum) == (1, 4.0)
    assert dict(metrics.outputs) == {"stop": 1}


def test_a_response_without_tokens_is_no_first_token(clock: Any, record: CallRecord) -> None:
    metrics = GenerationMetrics()
    with metrics.measure(GenerateRequest()) as measured:
        clock.now = 101.0
        measured.observe(part(0), "m")
        assert metrics.first_token.count == 0
        clock.now = 103.0
        measured.observe(last(1, finish=FINISH_REASON_LENGTH), "m")
    assert (metrics.first_token.sum, metrics.between_tokens.count) == (3.0, 0)
    assert dict(metrics.outputs) == {"length": 1}


def test_each_output_of_a_call_has_its_own_tokens(clock: Any, record: CallRecord) -> None:
    metrics = GenerationMetrics()
    with metrics.measure(GenerateRequest(n=2)) as measured:
        clock.now = 101.0
        measured.observe(part(1, 0), "m")
        clock.now = 102.0
        measured.observe(part(1, 1), "m")
        clock.now = 103.0
        measured.observe(last(1, 0), "m")
        measured.observe(last(1, 1), "m")
    assert (metrics.first_token.count, metrics.first_token.sum) == (2, 3.0)
    assert (metrics.between_tokens.count, metrics.between_tokens.sum) == (2, 3.0)
    assert record.completion_tokens == 4
    assert (record.prompt_tokens, record.cached_tokens) == (10, 6)  # once, though two outputs have it
    assert (record.finish_reasons, record.model_id) == (["stop", "stop"], "m")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(GeneratorExit, "cancelled"), (asyncio.CancelledError, "cancelled"), (ValueError, "error")],
)
def test_outputs_that_do_not_end_by_themselves(error: type[BaseException], reason: str) -> None:
    metrics = GenerationMetrics()
    with pytest.raises(error), metrics.measure(GenerateRequest(n=3)) as measured:
        measured.observe(last(1, 1), "m")
        raise error
    assert dict(metrics.outputs) == {"stop": 1, reason: 2}
