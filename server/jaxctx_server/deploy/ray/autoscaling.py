"""How many engines there should be. Nothing here knows Ray, or reads a clock."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxctx_server.engine_bounds import EngineBounds

ADD_AFTER_S = 5.0  # longer than some heartbeats: work that comes and goes sooner is done before a new engine has loaded
REMOVE_AFTER_S = 300.0  # much longer: an engine takes minutes to come back, with nothing in its cache
MAX_UTILIZATION = 0.75  # of the engines that would remain; at 1 another would be added again at once
FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    1.0,
    60.0,
)  # before an engine that failed is replaced; doubled for each failure in a row


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The requests that one engine has."""

    running: int
    waiting: int
    max_running: int  # how many it serves at once

    @property
    def requests(self) -> int:
        """All that it has."""
        return self.running + self.waiting

    @property
    def is_full(self) -> bool:
        """Whether one more request would wait."""
        return self.waiting > 0 or self.running >= self.max_running


@dataclass(frozen=True, slots=True)
class LoadTrend:
    """Since when all engines are full, and since when there is one too many; None: it is not so."""

    full_since: float | None = None
    spare_since: float | None = None


def decide_engine_count(
    loads: Collection[EngineLoad], starting: int, wanted: int, bounds: EngineBounds, trend: LoadTrend, now: float
) -> tuple[int, LoadTrend]:
    """How many engines are wanted from now on, and the trend to remember until the next decision.

    `loads` are those of the engines at the router that take work; `starting` others of ours are on their way; `now` is
    in seconds. No engine is added while one is on its way, as it may be the one that is missing. After a change the
    trend begins anew.
    """
    is_full = bool(loads) and not starting and all(load.is_full for load in loads)
    is_spare = bool(loads) and fits_fewer(loads, starting)
    trend = LoadTrend(
        full_since=holds_since(trend.full_since, is_full, now),
        spare_since=holds_since(trend.spare_since, is_spare, now),
    )
    if wanted < bounds.maximum and trend.full_since is not None and now - trend.full_since >= ADD_AFTER_S:
        return wanted + 1, LoadTrend()
    if wanted > bounds.minimum and trend.spare_since is not None and now - trend.spare_since >= REMOVE_AFTER_S:
        return wanted - 1, LoadTrend()
    return wanted, trend


def fits_fewer(loads: Collection[EngineLoad], starting: int) -> bool:
    """Whether all requests would fit without the largest engine, or without one that has not started yet."""
    capacity = sum(load.max_running for load in loads)
    if not starting:
        capacity -= max(load.max_running for load in loads)
    return sum(load.requests for load in loads) <= MAX_UTILIZATION * capacity


def holds_since(before: float | None, holds: bool, now: float) -> float | None:
    """Since when something holds, given since when it held before; None if it does not."""
    if not holds:
        return None
    return now if before is None else before


def retry_pause_s(failures: int) -> float:
    """Seconds to wait before another engine is started, after so many failed starts in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))
