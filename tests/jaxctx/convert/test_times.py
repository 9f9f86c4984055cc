"""Times and lifetimes: time zones, precision, and what an unset duration means."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx import types
from jaxctx.convert import times
from jaxctx.v1 import lifetime_pb2

NOON = datetime(2026, 7, 1, 12, 0, 0, 123_456, UTC)


def test_a_timestamp_is_a_utc_time_to_the_microsecond() -> None:
    assert times.timestamp_from_proto(times.timestamp_to_proto(NOON)) == NOON
    assert times.timestamp_from_proto(Timestamp(seconds=1, nanos=2_000)) == datetime(1970, 1, 1, 0, 0, 1, 2, UTC)
    assert times.timestamp_from_proto(Timestamp()).tzinfo is UTC


def test_a_time_of_another_zone_is_the_same_instant() -> None:
    elsewhere = NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert times.timestamp_to_proto(elsewhere) == times.timestamp_to_proto(NOON)


def test_a_time_without_a_zone_is_utc() -> None:
    assert times.timestamp_to_proto(NOON.replace(tzinfo=None)) == times.timestamp_to_proto(NOON)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0.0, Duration()),
        (0.25, Duration(nanos=250_000_000)),
        (-1.5, Duration(seconds=-1, nanos=-500_000_000)),
        (315_360_000.0, Duration(seconds=315_360_000)),
    ],
)
def test_seconds_are_a_duration(seconds: float, message: Duration) -> None:
    assert times.duration_to_proto(seconds) == message
    assert times.duration_from_proto(message) == seconds


def test_a_duration_is_sent_in_whole_microseconds_and_read_in_nanoseconds() -> None:
    assert times.duration_to_proto(1.000_000_4) == Duration(seconds=1)
    assert times.duration_to_proto(1.000_000_6) == Duration(seconds=1, nanos=1_000)
    assert times.duration_from_proto(Duration(nanos=1)) == 1e-9


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300])
def test_seconds_that_no_duration_holds_are_refused(seconds: float) -> None:
    with pytest.raises((OverflowError, ValueError)):
        times.duration_to_proto(seconds)


@pytest.mark.parametrize("sliding", [False, True])
def test_a_time_to_live_without_a_duration_is_for_ever(sliding: bool) -> None:
    assert times.ttl_from_proto(lifetime_pb2.Ttl(sliding=sliding)) == types.Ttl(None, sliding)
    assert not times.ttl_to_proto(types.Ttl(None, sliding)).HasField("duration")


def test_a_time_to_live_of_zero_is_not_for_ever() -> None:
    sent = times.ttl_to_proto(types.Ttl(0.0))
    assert sent.HasField("duration")
    assert times.ttl_from_proto(sent) == types.Ttl(0.0)


@pytest.mark.parametrize("seconds", [1e-9, 0.25, 300.25, 10 * 365 * 86_400.0])
def test_seconds_of_an_expiry_are_exact_to_the_microsecond(seconds: float) -> None:
    expiry = types.Expiry(at=types.utc_datetime(0.0), seconds=seconds, sliding=False)
    converted = times.expiry_from_proto(times.expiry_to_proto(expiry))
    assert math.isclose(converted.seconds, seconds, abs_tol=1e-9)


def test_an_expiry_has_its_time_its_seconds_and_whether_it_slides() -> None:
    message = times.expiry_to_proto(types.Expiry(at=NOON, seconds=30.5, sliding=True))
    assert message.at == times.timestamp_to_proto(NOON)
    assert message.duration == Duration(seconds=30, nanos=500_000_000)
    assert message.sliding
