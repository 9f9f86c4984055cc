"""Who is admitted, what gives way for that, and what is told of it."""

from jaxctx.engine.core.request import Request
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.scheduler_output import ContextSuspended, RequestFailed
from tests.jaxctx.engine.scheduler.conftest import Reply


def running(harness):
    return list(harness.scheduler.running)


def test_the_worst_case_is_reserved(make_scheduler) -> None:
    harness = make_scheduler(pages=6)
    first, second = harness.generation([1, 2], 12), harness.generation([3, 4], 12)  # four pages each
    for request in (first, second):
        harness.scheduler.submit(request)
    harness.schedule()
    assert running(harness) == [first]
    assert harness.scheduler.pages_reserved + first.context.working_pages == 4
    harness.scheduler.end(first)
    harness.schedule()
    assert running(harness) == [second]


def test_idle_contexts_are_suspended_least_recently_used_first(make_scheduler) -> None:
    harness = make_scheduler(pages=6)
    old, young = (harness.context([k] * 8, computed=True) for k in (1, 2))
    harness.scheduler.submit(harness.fill([3] * 16))
    assert harness.schedule().events == [ContextSuspended(old)]
    assert old.suspended
    assert not young.suspended


def test_a_lower_priority_is_preempted_and_resumes_first(make_scheduler) -> None:
    harness = make_scheduler(max_batch=1)
    low, high, later = harness.fill([1] * 20, priority=-1), harness.fill([2] * 4), harness.fill([3] * 4, priority=-1)
    harness.scheduler.submit(low)
    harness.step()
    for request in (later, high):
        harness.scheduler.submit(request)
    batch = harness.step()
    assert [each.request for each in batch.scheduled] == [high]
    assert harness.scheduler.stats().preemptions == 1
    harness.scheduler.end(high)
    assert [each.request for each in harness.step().scheduled] == [low]


def test_what_is_preempted_while_its_pages_come_back_is_not_taken_back(make_scheduler) -> None:
    """Its context holds pages of what was appended for it: it may wait, and is refused for nothing."""
    harness = make_scheduler(pages=16, host_pages=8, max_batch=1)
    tokens = list(range(24))
    earlier = harness.context(tokens, computed=True)
    harness.cache.suspend(earlier)
    blocks = harness.cache.block_manager
    blocks.evict(blocks.index.cached - 2)  # of six pages two stay on the device
    low = harness.fill(tokens, priority=-1, appended_tokens=len(tokens))
    harness.scheduler.submit(low)
    harness.scheduler.schedule(lambda slot: False)  # host memory has not been read yet
    assert low.restoring
    high = harness.fill([40] * 4)
    harness.scheduler.submit(high)
    assert [each.request for each in harness.step().scheduled] == [high]
    assert low.context.committed_pages > 0
    assert not low.never_ran
    harness.now += 1000.0
    low.caller = Caller(deadline=harness.now + 0.001)
    harness.schedule()
    assert not low.ended


def test_equal_priority_waits(make_scheduler) -> None:
    harness = make_scheduler(max_batch=1)
    first, second = harness.fill([1] * 20), harness.fill([2] * 4)
    for request in (first, second):
        harness.scheduler.submit(request)
    harness.step()
    harness.schedule()
    assert running(harness) == [first]


def test_a_request_waits_for_the_owner_of_its_prefix(harness) -> None:
    owner, reader = harness.fill(list(range(20))), harness.fill([*range(20), 99])
    other = harness.fill([7, 7])
    for request in (owner, reader, other):
        harness.scheduler.submit(request)
    batch = harness.step()
    assert [each.request for each in batch.scheduled] == [owner]  # 16 rows
    assert reader.prefix_owner is owner
    assert running(harness) == [owner, other]  # which passes it
    harness.step()
    harness.scheduler.end(owner)
    harness.schedule()
    assert reader in running(harness)
    assert reader.resident_tokens == 20


def test_only_a_request_of_equal_switches_waits_for_the_owner_of_its_prefix(harness) -> None:
    def switched(place: int, revision: str) -> Request:
        context = harness.context(list(range(place)))
        harness.cache.switch_adapter(context, "", revision)
        harness.cache.append(context, list(range(place, 20)))
        return Request(context, Caller(), Reply())

    owner = switched(2, "content")
    equal, elsewhere, other = switched(2, "content"), switched(3, "content"), switched(2, "x")
    for request in (owner, equal, elsewhere, other):
        harness.scheduler.submit(request)
    harness.step()
    assert running(harness) == [owner, elsewhere, other]
    assert [each.prefix_owner for each in (equal, elsewhere, other)] == [owner, None, None]


def test_where_all_pages_are_pinned_waiting_would_not_help(make_scheduler) -> None:
    harness = make_scheduler(pages=4)
    harness.context([1] * 12, pinned=True, computed=True)
    request = harness.fill([2] * 8)
    harness.scheduler.submit(request)
    decided = harness.schedule()
    (event,) = decided.events
    assert decided.batch is None
    assert isinstance(event, RequestFailed)
    assert (event.request, event.error.reason) == (request, "OUT_OF_PAGES")


def test_time_in_the_queue_counts_once_for_a_request_that_starts_twice(make_scheduler) -> None:
    harness = make_scheduler(max_batch=1)
    low, high = harness.fill([1] * 20, priority=-1), harness.fill([2] * 4)
    harness.scheduler.submit(low)
    harness.now += 3.0
    harness.step()
    harness.scheduler.submit(high)
    harness.now += 0.5
    harness.step()  # of `high`, for which `low` is preempted
    harness.scheduler.end(high)
    harness.now += 7.0
    harness.step()
    assert running(harness) == [low]
    stats = harness.scheduler.stats()
    assert (stats.requests_admitted, stats.queue_seconds) == (2, 3.5)
