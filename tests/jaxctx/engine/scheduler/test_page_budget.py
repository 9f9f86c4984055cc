"""Pages that may still be given away."""

from jaxctx.engine.scheduler.page_budget import Claim, PageBudget


def budget_of(harness) -> PageBudget:
    return PageBudget(harness.cache, harness.cache.block_manager, harness.scheduler.running)


def test_promised_pages_are_not_claimable(harness) -> None:
    budget = budget_of(harness)
    assert budget.claimable() == 16
    request = harness.generation([1, 2], 30)  # eight pages in the worst case
    harness.scheduler.submit(request)
    harness.schedule()
    assert budget.claimable() == 8
    assert budget.claim(8) == Claim(True)
    assert budget.claim(9) == Claim(False)  # a running request is not suspended


def test_a_claim_suspends_no_more_than_it_needs(harness) -> None:
    budget = budget_of(harness)
    contexts = [harness.context([k] * 16, computed=True) for k in range(4)]
    assert budget.claim(5) == Claim(True, contexts[:2])
    assert budget.suspensions == 2
    assert [each.suspended for each in contexts] == [True, True, False, False]


def test_a_claim_that_fails_has_suspended_nobody(harness) -> None:
    budget = budget_of(harness)
    pinned = harness.context([1] * 16, pinned=True, computed=True)
    idle = harness.context([2] * 16, computed=True)
    assert budget.claim(13) == Claim(False)
    assert not pinned.suspended
    assert not idle.suspended
    assert budget.claim(12) == Claim(True, [idle])
