"""Which requests wait and run, what frees their slots and pages, and what is noted of them."""

from __future__ import annotations

import math

import pytest

from jaxctx.engine.core.request import NO_SLOT, Request
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.active_requests import ActiveRequests
from jaxctx.engine.scheduler.scheduler_output import ContextSuspended, RequestFailed, RequestFinished
from jaxctx.errors import ResourceExhausted

SLOTS = 2


@pytest.fixture
def active(harness) -> ActiveRequests:
    """The requests of a scheduler of their own, over the cache of the harness."""
    return ActiveRequests(harness.cache, harness.cache.block_manager, SLOTS, "model")


def add(active: ActiveRequests, *requests: Request) -> None:
    for request in requests:
        active.add(request)


def start(active: ActiveRequests, *requests: Request) -> None:
    """Add requests and let them run."""
    add(active, *requests)
    for request in requests:
        active.start(request)


def in_turn(active: ActiveRequests) -> list[Request]:
    return list(active.queue.in_turn())


def test_a_new_request_waits(harness, active) -> None:
    request = harness.fill([1, 2])
    active.add(request)
    assert (active.waiting, in_turn(active), active.running) == (1, [request], [])
    assert active.writers == {request.context: request}
    assert not request.runs


def test_requests_that_run_have_a_slot_each_the_lowest_first(harness, active) -> None:
    first, second, third = (harness.fill([number]) for number in range(3))
    add(active, first, second, third)
    active.start(first)
    active.start(second)
    assert [request.slot for request in (first, second)] == [0, 1]
    assert active.running == [first, second]
    assert (active.waiting, in_turn(active), active.free_slots) == (1, [third], [])


def test_a_request_that_starts_restores_first_and_forgets_the_progress_of_an_earlier_run(harness, active) -> None:
    request = harness.fill([1, 2, 3])
    request.dispatch_end = request.next_position = request.prompt_end = 3
    start(active, request)
    assert request.restoring
    assert (request.dispatch_end, request.next_position, request.prompt_end) == (0, 0, 0)


def test_the_tenant_of_a_request_that_starts_goes_behind_the_others(harness, active) -> None:
    first, second = harness.fill([1], tenant="a"), harness.fill([2], tenant="a")
    other = harness.fill([3], tenant="b")
    add(active, first, second, other)
    active.start(first)
    assert in_turn(active) == [other, second]


def test_a_preempted_request_waits_before_the_others_of_its_tenant(harness, active) -> None:
    preempted, waiting = harness.fill([1]), harness.fill([2])
    start(active, preempted)
    active.add(waiting)
    active.preempt(preempted)
    assert in_turn(active) == [preempted, waiting]
    assert (active.running, active.waiting, active.preemptions) == ([], 2, 1)
    assert preempted.slot == NO_SLOT
    assert not preempted.ended


def test_a_slot_that_becomes_free_is_given_again(harness, active) -> None:
    first, second, third = (harness.fill([number]) for number in range(3))
    start(active, first, second)
    active.end(first)
    start(active, third)
    assert third.slot == 0


@pytest.mark.parametrize("stop", ["preempt", "end"])
def test_results_in_flight_of_a_stopped_request_are_of_an_earlier_run(harness, active, stop: str) -> None:
    request = harness.fill([1])
    start(active, request)
    run_number = request.run_number
    active.preempt(request) if stop == "preempt" else active.end(request)
    assert request.run_number == run_number + 1


def test_a_stopped_request_gives_back_pages_taken_in_vain(harness, active) -> None:
    """Two tokens need one page. Of the three other working pages only two were taken by this run."""
    request = harness.fill([1, 2])
    harness.cache.grow(request.context, 2)
    harness.cache.mark_computed(request.context, 2)
    harness.cache.grow(request.context, 13)
    assert len(request.context.working) == 4
    start(active, request)
    request.taken_pages, request.reserved_pages, request.context.busy = 2, 5, True
    active.preempt(request)
    assert len(request.context.working) == 2
    assert (request.taken_pages, request.reserved_pages, request.context.busy) == (0, 0, False)
    assert request.context.working_tokens == 2


def test_a_stopped_request_keeps_the_pages_that_its_tokens_need(harness, active) -> None:
    request = harness.fill([1, 2, 3, 4, 5])
    harness.cache.grow(request.context, 8)
    harness.cache.mark_computed(request.context, 5, hold=True)
    start(active, request)
    request.taken_pages = 2
    active.end(request)
    assert (request.context.seq_len, len(request.context.working)) == (5, 2)


def test_a_request_of_a_suspended_context_has_no_pages_to_give_back(harness, active) -> None:
    request = harness.fill([1, 2])
    start(active, request)
    harness.cache.suspend(request.context)
    request.taken_pages = 1
    active.preempt(request)
    assert request.context.working == []


def test_a_stopped_request_has_used_its_context(harness, active) -> None:
    request = harness.fill([1])
    start(active, request)
    harness.now = 12.0
    active.preempt(request)
    assert request.context.used_at == 12.0


@pytest.mark.parametrize("runs", [False, True])
def test_an_ended_request_is_gone_wherever_it_was(harness, active, runs: bool) -> None:
    request = harness.fill([1])
    active.add(request)
    if runs:
        active.start(request)
    active.end(request)
    assert (active.writers, active.running, active.waiting, len(active.queue)) == ({}, [], 0, 0)
    assert request.ended
    assert sorted(active.free_slots) == [0, 1]
    assert active.take_events() == ()


def test_requests_fail_whether_they_ever_ran_or_not(harness, active) -> None:
    error = ResourceExhausted("full")
    never_ran, ran = harness.fill([1]), harness.fill([2])
    add(active, never_ran, ran)
    active.start(ran)
    active.preempt(ran)
    for request in (never_ran, ran):
        active.fail(request, error)
    assert active.take_events() == [RequestFailed(never_ran, error), RequestFailed(ran, error)]
    assert active.writers == {}


def test_events_are_taken_once_and_in_their_order(harness, active) -> None:
    request, first, second = harness.fill([1]), harness.context([1]), harness.context([2])
    active.add(request)
    active.note_suspended([first, second])
    active.finish(request)
    *suspended, finished = active.take_events()
    assert suspended == [ContextSuspended(first), ContextSuspended(second)]
    assert isinstance(finished, RequestFinished)
    assert (finished.request, finished.context.context_id) == (request, request.context.id)
    assert active.take_events() == ()


def test_slots_to_load_are_those_of_requests_that_still_run(harness, active) -> None:
    runs, preempted = harness.fill([1]), harness.fill([2])
    start(active, runs, preempted)
    active.note_slot_to_load(preempted)
    active.note_slot_to_load(runs)
    active.preempt(preempted)
    assert active.take_slots_to_load() == [runs]
    assert active.take_slots_to_load() == ()


def test_whatever_may_let_a_request_in_is_a_change(harness, active) -> None:
    request = harness.fill([1])
    changes = [active.changes]
    active.add(request)
    changes.append(active.changes)
    active.start(request)
    active.preempt(request)
    changes.append(active.changes)
    active.end(request)
    changes.append(active.changes)
    active.note_change()
    changes.append(active.changes)
    assert changes == sorted(set(changes))  # it grew each time


def test_tenants_are_those_that_run_and_those_that_wait_at_a_priority_or_above(harness, active) -> None:
    running = harness.fill([1], tenant="runs", priority=-5)
    below, equal, above = (
        harness.fill([2], tenant=f"waits at {priority}", priority=priority) for priority in (-1, 0, 1)
    )
    start(active, running)
    add(active, below, equal, above)
    assert active.tenants("asks", 0) == {"asks", "runs", "waits at 0", "waits at 1"}


def test_the_deadline_of_every_request_passes_once(harness, active) -> None:
    waits, runs, ends, without = (harness.generation([number], 4, timeout_s=5.0) for number in range(4))
    without.caller = Caller()
    add(active, waits, ends, without)
    start(active, runs)
    active.end(ends)
    assert active.deadlines.due(waits.caller.deadline - 0.001) == []
    assert active.deadlines.due(waits.caller.deadline) == [waits, runs]
    assert active.deadlines.due(math.inf) == []


def test_only_requests_that_wait_are_checked_again(harness, active) -> None:
    waits, starts, preempted, ends, never = (harness.fill([number]) for number in range(5))
    for request in (waits, starts, preempted, ends):
        request.start_by = 7.0
    add(active, waits, ends, never)
    start(active, starts, preempted)
    active.end(ends)
    assert active.reviews.due(7.0) == [waits]
    active.review_at(waits, 9.0)
    active.preempt(preempted)  # its time passed while it ran
    assert active.reviews.due(8.0) == [preempted]
    assert active.reviews.due(math.inf) == [waits]
