"""What steps took, and what follows for a request: numbers alone, without an engine."""

import math
import random

import pytest

from jaxctx.engine.scheduler.forecast import Demand, Forecast, OutputLengths, QueueState, StepCosts

NOW = 1000.0
ONE = Demand(tokens=100)


def measured(costs: StepCosts, seconds: float, decoding: int = 8, *, steps: int = 300, prompt_rows: int = 0) -> None:
    for _ in range(steps):
        costs.observe(NOW, seconds, decoding=decoding, tokens=decoding, prompt_rows=prompt_rows)


def forecast(seconds: float = 0.01, decoding: int = 8) -> Forecast:
    known = Forecast()
    measured(known.costs, seconds, decoding)
    return known


def test_nothing_is_known_before_it_is_measured_and_what_is_not_known_is_not_late() -> None:
    unknown, full = Forecast(), QueueState(8, 8, [100.0] * 8, 10_000, ONE, 10_000)
    assert unknown.costs.token_s(NOW, 8) is None
    assert unknown.costs.row_s(NOW) == 0
    assert unknown.shortfall_s(NOW, 0.001, ONE, full) == 0
    assert unknown.lateness(NOW, 0.001, ONE, 8, 0.0) <= 1
    measured(unknown.costs, 5.0, steps=7)
    assert unknown.shortfall_s(NOW, 0.001, ONE, full) == 0


def test_a_token_takes_what_steps_of_so_many_took_or_of_fewer() -> None:
    costs = StepCosts()
    measured(costs, 0.01, decoding=8)
    measured(costs, 0.03, decoding=32)
    for decoding, seconds in ((5, 0.01), (8, 0.01), (9, 0.01), (17, 0.03), (32, 0.03), (200, 0.03)):
        told = costs.token_s(NOW, decoding)
        assert told is not None
        assert told.low == pytest.approx(seconds)
        assert told.high == pytest.approx(seconds)
    assert costs.token_s(NOW, 4) is None  # it may be anything down to nothing


def test_drafts_that_were_right_make_tokens_cheaper() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(NOW, 0.03, decoding=2, tokens=6, prompt_rows=0)
    told = costs.token_s(NOW, 2)
    assert told is not None
    assert told.high == pytest.approx(0.01)


def test_a_stall_hardly_moves_the_average_and_a_slower_machine_does() -> None:
    costs = StepCosts()
    measured(costs, 0.01)
    measured(costs, 30.0, steps=1)
    told = costs.token_s(NOW, 8)
    assert told is not None
    assert told.low < 0.0102
    assert told.high < 0.013
    measured(costs, 0.05, steps=100)
    told = costs.token_s(NOW, 8)
    assert told is not None
    assert told.high > 0.045


def test_prompts_cost_what_they_make_steps_longer_and_slow_down_the_others() -> None:
    costs = StepCosts()
    measured(costs, 0.01, decoding=8)
    alone = costs.token_s(NOW, 8)
    for _ in range(2000):  # every other step is twice as long, for 10 rows
        measured(costs, 0.02, decoding=8, steps=1, prompt_rows=10)
        measured(costs, 0.01, decoding=8, steps=1)
    assert costs.row_s(NOW) == pytest.approx(0.001, rel=0.05)
    mixed = costs.token_s(NOW, 8)
    assert alone is not None
    assert mixed is not None
    assert mixed.low == pytest.approx(1.5 * alone.low, rel=0.05)


def test_what_was_measured_long_ago_is_believed_less_and_less() -> None:
    known, empty = forecast(1.0), QueueState(8, 8, [], 0)
    late = [
        known.shortfall_s(NOW + later, 10.0, ONE, QueueState(8, 8, [100.0] * 7, 0)) for later in (0, 5, 15, 25, 120)
    ]
    assert late[0] == late[1] == pytest.approx(90)
    assert late[2] == pytest.approx(40)
    assert late[3] == pytest.approx(15)
    assert late[4] == 0  # so that it is tried again
    assert known.shortfall_s(NOW, 10.0, ONE, empty) == 0  # of one alone nothing was measured


@pytest.mark.parametrize("at_fair_share", [False, True])
@pytest.mark.parametrize(
    ("ahead", "wait"),
    [(0, 0.1), (1, 0.3), (3, 0.7), (4, 0.1 + 1), (7, 0.7 + 1), (8, 0.1 + 2), (4000, 0.1 + 1000)],
)
def test_slots_become_free_one_after_the_other(ahead: int, wait: float, at_fair_share: bool) -> None:
    known = forecast(0.01, 4)
    queue = QueueState(4, 4, [10.0, 30.0, 50.0, 70.0], ahead, ONE, at_fair_share=at_fair_share)
    margin = 0.25 if at_fair_share else 0.0  # of its own second
    assert known.shortfall_s(NOW, wait + 1 + margin + 1e-6, ONE, queue) == 0
    assert known.shortfall_s(NOW, wait + 0.9, ONE, queue) == pytest.approx(margin + 0.1)


def test_a_tenant_counts_on_its_share_of_the_slots() -> None:
    known = forecast(0.01, 4)
    queue = QueueState(4, 1, [10.0, 30.0, 50.0, 70.0], 3, ONE)
    assert known.shortfall_s(NOW, 1.0, ONE, queue) == pytest.approx(3.1)


def test_free_slots_mean_no_wait_and_no_margin() -> None:
    known = forecast(0.01, 4)
    assert known.shortfall_s(NOW, 1.001, ONE, QueueState(4, 4, [90.0], 2, ONE)) == 0
    assert known.shortfall_s(NOW, 0.9, ONE, QueueState(4, 4, [90.0, 90.0, 90.0], 0)) == pytest.approx(0.1)


def test_if_it_is_too_slow_among_many_it_may_do_among_few() -> None:
    known = Forecast()
    measured(known.costs, 0.01, 16)
    measured(known.costs, 0.03, 32)
    assert known.shortfall_s(NOW, 2.0, ONE, QueueState(32, 32, [10.0] * 31, 0)) == 0
    assert known.shortfall_s(NOW, 0.9, ONE, QueueState(32, 32, [10.0] * 31, 0)) > 0


def test_of_running_ones_those_that_are_nearly_done_have_more_patience() -> None:
    known = forecast(0.01, 8)
    assert known.lateness(NOW, 0.9, ONE, 8, 0.0) > 1
    assert known.lateness(NOW, 0.95, ONE, 8, 0.99) <= 1
    assert known.lateness(NOW, 0.5, ONE, 8, 0.99) > 1
    assert known.lateness(NOW, math.inf, ONE, 8, 0.0) == 0


def test_lengths_are_known_by_tenant_and_size_and_forgotten() -> None:
    lengths, rng = OutputLengths(), random.Random(1)
    assert lengths.expect(NOW, "a", 1000, 0.5) is None
    for _ in range(100):
        lengths.observe(NOW, "a", 1000, rng.randint(90, 110))
        lengths.observe(NOW, "b", 1000, 1000)
    assert lengths.expect(NOW, "a", 1000, 0.5) == pytest.approx(100, abs=10)
    assert lengths.expect(NOW, "b", 1000, 0.5) == 1000
    assert lengths.expect(NOW, "c", 1000, 0.25) == pytest.approx(100, abs=15)  # as others'
    assert lengths.expect(NOW, "a", 100, 0.5) is None  # of another size
    assert lengths.expect(NOW, "a", 1000, 0.5, done=500) == 1000  # nobody's of that tenant are longer
    assert lengths.expect(NOW, "a", 1000, 0.1, done=104) == pytest.approx(107, abs=4)
    assert lengths.expect(NOW + 121, "a", 1000, 0.5) is None


def test_many_tenants_are_not_many_memories() -> None:
    lengths = OutputLengths()
    for n in range(10_000):
        lengths.observe(NOW, str(n), 100, 50)
    assert len(lengths._kinds) <= 4096
