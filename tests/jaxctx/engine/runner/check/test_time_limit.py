"""A check that never ends, and all ways in which one ends. No test waits for a limit that is a length of time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from jaxctx.engine.runner.check import time_limit
from jaxctx.engine.runner.check.comparison import check_kernels
from jaxctx.engine.runner.check.report import KernelReport, Verdict
from jaxctx.engine.runner.check.time_limit import PREPARATION, NeverEnds, within_limit
from tests.jaxctx.engine.runner.check.test_comparison import program
from tests.jaxctx.engine.runner.check.test_report import EMPTY, case
from tests.planted_kernels import END, WAITING, never_ends, plant_kernel

REPORT = replace(EMPTY, cases=[case("tpu", Verdict.EQUAL)])


class Queue:
    """Its limit has passed when there is nothing in it and the check waits for ever, as `waiting` says."""

    def __init__(self, waiting: threading.Event) -> None:
        self.waiting = waiting
        self.timeouts: list[float] = []
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.put = self._queue.put

    def get(self, timeout: float) -> Any:
        self.timeouts.append(timeout)
        while True:
            waits = self.waiting.is_set()  # before looking: then nothing comes after it
            try:
                return self._queue.get(timeout=0.01)
            except Empty:
                if waits:
                    raise


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue(threading.Event())
    monkeypatch.setattr(time_limit, "SimpleQueue", lambda: queue)
    return queue


def test_what_ends_is_as_without_a_limit() -> None:
    threads = []

    def check(tell: Callable[[str], None]) -> KernelReport:
        threads.append(threading.current_thread())
        tell("tpu: a")
        return REPORT

    assert within_limit(600, check) is REPORT
    assert threads[0].daemon  # or a process that is to end would wait for it

    def fail(tell: Callable[[str], None]) -> KernelReport:
        raise MemoryError("no pool")

    with pytest.raises(MemoryError, match="no pool"):
        within_limit(600, fail)


@pytest.mark.parametrize("cases", [[], ["reference: a", "tpu: a"]])
def test_the_case_that_never_ends_is_named(queue: Queue, cases: list[str]) -> None:
    end = threading.Event()

    def check(tell: Callable[[str], None]) -> KernelReport:
        for name in cases:
            tell(name)
        queue.waiting.set()
        end.wait()
        return REPORT

    try:
        with pytest.raises(NeverEnds, match=r"did not end within 7 s$") as raised:
            within_limit(7, check)
    finally:
        end.set()
    assert raised.value.case == (cases[-1] if cases else PREPARATION)
    assert queue.timeouts == [7] * (len(cases) + 1)  # of each case


def test_a_kernel_that_jax_waits_for_is_noticed(queue: Queue) -> None:
    queue.waiting = WAITING
    with plant_kernel(never_ends):
        try:
            with pytest.raises(NeverEnds) as raised:
                within_limit(600, lambda tell: check_kernels(program(), "tiny", lambda _, case: tell(case)))
        finally:
            END.set()
            for thread in threading.enumerate():
                if thread.name == "jaxctx-check":
                    thread.join()
            WAITING.clear()
            END.clear()
    assert raised.value.case == "tpu: decoding, 16 rows"
