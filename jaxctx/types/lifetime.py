"""How long objects exist, and times."""

from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """When an object expires. It can be read until then, and neither later nor deleted earlier."""

    at: datetime  # the time of expiry, as of now
    seconds: float  # the time to live that was requested
    sliding: bool  # whether every use starts the time to live again


@dataclass(frozen=True, slots=True)
class Ttl:
    """The time to live of an object, from now on."""

    seconds: float | None = None  # above 0, up to 10 years. None: for ever
    sliding: bool = False  # whether every use starts it again


def utc_datetime(unix_s: float) -> datetime:
    """A time in unix seconds as a UTC datetime, as results have it."""
    return datetime.fromtimestamp(unix_s, UTC)
