"""When engines are added and removed, out of their load."""

from __future__ import annotations

from jaxctx_server.deploy.ray.autoscaling import (
    ADD_AFTER_S,
    REMOVE_AFTER_S,
    EngineLoad,
    LoadTrend,
    decide_engine_count,
    retry_pause_s,
)
from jaxctx_server.engine_bounds import EngineBounds


class EngineCountDecisions:
    """Decisions one after the other, a second apart. Engines serve four requests at once."""

    def __init__(self, wanted: int, bounds: str = "1:4") -> None:
        self._bounds = EngineBounds.parse(bounds)
        self._trend, self._now = LoadTrend(), 100.0
        self.wanted = wanted

    def after(self, seconds: float, *loads: tuple[int, int], starting: int = 0) -> int:
        """How many engines are wanted after so many seconds of these loads: (running, waiting) of each engine."""
        seen = [EngineLoad(running, waiting, 4) for running, waiting in loads]
        for _ in range(int(seconds) + 1):
            self.wanted, self._trend = decide_engine_count(
                seen, starting, self.wanted, self._bounds, self._trend, self._now
            )
            self._now += 1.0
        return self.wanted


def test_one_is_added_when_all_have_been_full_for_some_seconds() -> None:
    decisions = EngineCountDecisions(2)
    assert decisions.after(ADD_AFTER_S - 1, (4, 0), (2, 1)) == 2
    assert decisions.after(0, (4, 0), (3, 0)) == 2  # the time begins anew
    assert decisions.after(ADD_AFTER_S - 1, (4, 0), (4, 3)) == 2
    assert decisions.after(0, (4, 0), (4, 3)) == 3


def test_none_is_added_while_one_is_on_its_way() -> None:
    decisions = EngineCountDecisions(2)
    assert decisions.after(60, (4, 9), starting=1) == 2
    assert decisions.after(ADD_AFTER_S, (4, 9), (4, 9)) == 3
    assert decisions.after(0, (4, 9), (4, 9)) == 3  # nor at once when one has been


def test_there_are_never_more_than_most_or_fewer_than_least() -> None:
    assert EngineCountDecisions(3, "2:3").after(1000, *[(4, 9)] * 3) == 3
    assert EngineCountDecisions(2, "2:3").after(1000, (0, 0), (0, 0)) == 2
    assert EngineCountDecisions(1, "1").after(1000, (0, 0)) == 1


def test_one_is_removed_when_long_fewer_would_do() -> None:
    decisions = EngineCountDecisions(3)
    assert decisions.after(REMOVE_AFTER_S - 1, (2, 0), (2, 0), (2, 0)) == 3
    assert decisions.after(0, (2, 0), (2, 0), (2, 0)) == 2
    assert decisions.after(REMOVE_AFTER_S - 1, (2, 0), (0, 0)) == 2
    assert decisions.after(0, (2, 0), (0, 0)) == 1


def test_a_removal_would_not_make_the_others_full() -> None:
    assert EngineCountDecisions(2).after(1000, (4, 0), (0, 0)) == 2
    assert EngineCountDecisions(2).after(1000, (3, 0), (0, 0)) == 1


def test_one_that_is_not_needed_any_more_need_not_come() -> None:
    """As when the cluster has no room for it."""
    decisions = EngineCountDecisions(2)
    assert decisions.after(REMOVE_AFTER_S, (1, 0), starting=1) == 1


def test_without_engines_at_the_router_nothing_is_decided() -> None:
    assert EngineCountDecisions(2).after(1000, starting=2) == 2


def test_pauses_grow_to_a_minute() -> None:
    pauses = [retry_pause_s(failures) for failures in range(100)]
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == max(pauses) == 60.0
