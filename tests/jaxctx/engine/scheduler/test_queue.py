"""The order in which waiting requests are considered."""

from jaxctx.engine.scheduler.forecast import Demand
from jaxctx.engine.scheduler.queue import WaitingQueue


def order(queue: WaitingQueue) -> list:
    return list(queue.in_turn())


def test_priority_then_turns_of_tenants_then_arrival(harness) -> None:
    queue = WaitingQueue()
    a = [harness.fill([k], tenant="a") for k in range(2)]
    b = harness.fill([5], tenant="b")
    urgent = harness.fill([6], tenant="b", priority=1)
    for request in (*a, b, urgent):
        queue.push(request)
    assert order(queue) == [urgent, *a, b]
    assert queue.remove(a[0], served=True)
    assert order(queue) == [urgent, b, a[1]]
    queue.push(a[0], front=True)
    assert order(queue) == [urgent, a[0], a[1], b]
    assert len(queue) == 4


def test_a_request_that_could_not_go_on_is_passed_over(harness) -> None:
    queue = WaitingQueue()
    slow, other = harness.fill([1]), harness.fill([2])
    for request in (slow, other):
        queue.push(request)
    slow.reply.behind = True
    assert order(queue) == [other]
    assert len(queue) == 2


def test_removing_finds_a_request_whose_priority_has_changed(harness) -> None:
    queue = WaitingQueue()
    request = harness.fill([1])
    queue.push(request)
    request.context.priority = 5
    assert queue.remove(request)
    assert not queue.remove(request)
    assert len(queue) == 0


def test_what_a_new_request_would_wait_behind(harness) -> None:
    queue = WaitingQueue()
    for rows, priority in ((10, 0), (20, 0), (5, 3)):
        request = harness.fill([1], tenant="a", priority=priority)
        request.demand = Demand(rows, 2.0)
        queue.push(request)
    assert queue.ahead_of(0, "a") == (2, Demand(15.0, 2.0), 1)
    assert queue.ahead_of(0, "b") == (0, Demand(), 1)
    assert queue.tenants(1) == {"a"}
    assert queue.longest(0) == ("a", 2)
    assert queue.latest(0, "a") is order(queue)[-1]
    assert queue.latest(-1, "a") is None
