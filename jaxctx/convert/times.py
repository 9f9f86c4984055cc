"""Times and lifetimes: Timestamp, Duration, Ttl and Expiry."""

from datetime import UTC, datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx.types import Expiry, Ttl
from jaxctx.v1 import lifetime_pb2


def timestamp_from_proto(message: Timestamp) -> datetime:
    """The time in UTC."""
    return message.ToDatetime(UTC)


def timestamp_to_proto(value: datetime) -> Timestamp:
    """The time as a Timestamp; without a time zone it is UTC."""
    message = Timestamp()
    message.FromDatetime(value)
    return message


def duration_from_proto(message: Duration) -> float:
    """The duration in seconds."""
    return message.ToNanoseconds() / 1e9


def duration_to_proto(seconds: float) -> Duration:
    """The seconds as a Duration, rounded to microseconds."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def ttl_from_proto(message: lifetime_pb2.Ttl) -> Ttl:
    """The time to live. Without a duration it is for ever."""
    seconds = duration_from_proto(message.duration) if message.HasField("duration") else None
    return Ttl(seconds=seconds, sliding=message.sliding)


def ttl_to_proto(value: Ttl) -> lifetime_pb2.Ttl:
    """The time to live; `seconds` of None is an unset duration."""
    duration = None if value.seconds is None else duration_to_proto(value.seconds)
    return lifetime_pb2.Ttl(duration=duration, sliding=value.sliding)


def expiry_from_proto(message: lifetime_pb2.Expiry) -> Expiry:
    """When an object ends."""
    return Expiry(
        at=timestamp_from_proto(message.at),
        seconds=duration_from_proto(message.duration),
        sliding=message.sliding,
    )


def expiry_to_proto(value: Expiry) -> lifetime_pb2.Expiry:
    """When an object ends."""
    return lifetime_pb2.Expiry(
        at=timestamp_to_proto(value.at),
        duration=duration_to_proto(value.seconds),
        sliding=value.sliding,
    )
