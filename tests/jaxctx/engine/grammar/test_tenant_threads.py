"""Threads that tenants share: each tenant's work in order, one at a time, and none of it lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from jaxctx.engine.grammar.tenant_threads import TenantThreads
from jaxctx.errors import ResourceExhausted, Unavailable


@pytest.fixture
def threads() -> Iterator[TenantThreads]:
    made = TenantThreads(2, "test", max_waiting=2)
    yield made
    made.close()


def test_a_result_and_an_error_reach_the_caller(threads: TenantThreads) -> None:
    assert threads.submit("a", lambda: 7).result(5) == 7
    with pytest.raises(KeyError):
        threads.submit("a", lambda: {}["missing"]).result(5)
    assert threads.submit("a", lambda: 8).result(5) == 8


def test_work_of_one_tenant_is_done_in_order_and_never_together() -> None:
    threads, done = TenantThreads(4, "test"), []
    running = threading.Semaphore(1)

    def work(number: int) -> None:
        assert running.acquire(blocking=False)
        done.append(number)
        running.release()

    for future in [threads.submit("a", lambda number=number: work(number)) for number in range(200)]:  # type: ignore[misc]
        future.result(5)
    threads.close()
    assert done == list(range(200))


def test_a_tenant_that_takes_long_holds_up_no_other(threads: TenantThreads) -> None:
    gate = threading.Event()
    slow = [threads.submit("slow", gate.wait) for _ in range(3)]
    assert threads.submit("quick", lambda: 1).result(5) == 1
    assert not any(future.done() for future in slow)
    gate.set()
    assert [future.result(5) for future in slow] == [True] * 3


def test_a_tenant_may_only_have_so_much_waiting(threads: TenantThreads) -> None:
    gate = threading.Event()
    kept = [threads.submit("a", gate.wait) for _ in range(3)]
    with pytest.raises(ResourceExhausted) as refused:
        threads.submit("a", gate.wait)
    assert (refused.value.reason, refused.value.retry_after_s) == ("QUEUE_FULL", 1.0)
    gate.set()
    assert [future.result(5) for future in kept] == [True] * 3
    assert threads.submit("a", lambda: 2).result(5) == 2


def test_what_is_cancelled_while_it_waits_does_not_run(threads: TenantThreads) -> None:
    gate, ran = threading.Event(), []
    threads.submit("a", gate.wait)
    cancelled = threads.submit("a", lambda: ran.append("cancelled"))
    assert cancelled.cancel()
    last = threads.submit("a", lambda: ran.append("last"))
    gate.set()
    last.result(5)
    assert ran == ["last"]


def test_what_is_cancelled_does_not_count_as_waiting(threads: TenantThreads) -> None:
    gate = threading.Event()
    running = threads.submit("a", gate.wait)
    for _ in range(5):
        for cancelled in [threads.submit("a", gate.wait) for _ in range(2)]:
            assert cancelled.cancel()
    kept = [threads.submit("a", lambda: 1) for _ in range(2)]
    with pytest.raises(ResourceExhausted):
        threads.submit("a", gate.wait)
    gate.set()
    assert [future.result(5) for future in [running, *kept]] == [True, 1, 1]


def test_closing_ends_what_waits_with_an_error(threads: TenantThreads) -> None:
    gate = threading.Event()
    running, waiting, cancelled = (threads.submit("a", gate.wait) for _ in range(3))
    assert cancelled.cancel()
    threads.close()
    with pytest.raises(Unavailable) as ended:
        waiting.result(5)
    assert (ended.value.reason, ended.value.retry_after_s) == ("NOT_SERVING", 1.0)
    with pytest.raises(Unavailable):
        threads.submit("a", gate.wait)
    gate.set()
    assert running.result(5)
