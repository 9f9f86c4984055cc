"""Threads for native steps: whose turn it is, when a time begins, and when a thread is free again."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jaxctx.programs.step_threads import StepThreads
from tests.jaxctx.programs.conftest import run_event_loop, until

LONG_S = 60.0


class Functions:
    """Functions that end when the test says so, and note that they have begun."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._ends: dict[str, threading.Event] = {}

    def make(self, name: str) -> Callable[[], str]:
        """A function that returns its name."""
        self._ends[name] = threading.Event()

        def function() -> str:
            self.began.append(name)
            self._ends[name].wait(10)
            return name

        return function

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    def end_all(self) -> None:
        self.end(*self._ends)


@pytest.fixture
def functions() -> Iterator[Functions]:
    made = Functions()
    yield made
    made.end_all()


def start(
    threads: StepThreads, functions: Functions, *names: str, timeout_s: float = LONG_S
) -> list[asyncio.Task[str]]:
    """Run a function for each name, whose first letter is its tenant."""
    return [asyncio.create_task(threads.run(name[0], functions.make(name), timeout_s)) for name in names]


async def test_a_result_and_an_error_reach_the_caller() -> None:
    threads = StepThreads(2)
    assert await threads.run("a", lambda: 7, LONG_S) == 7
    with pytest.raises(KeyError):
        await threads.run("a", lambda: {}["missing"], LONG_S)
    assert await threads.run("a", lambda: 8, LONG_S) == 8


async def test_a_tenant_leaves_a_thread_to_the_others(functions: Functions) -> None:
    threads = StepThreads(3)
    start(threads, functions, "a1", "a2", "a3")
    await until(lambda: len(functions.began) == 2)
    start(threads, functions, "b1")
    await until(lambda: len(functions.began) == 3)
    assert sorted(functions.began) == ["a1", "a2", "b1"]
    functions.end("b1")
    await run_event_loop()
    assert "a3" not in functions.began
    functions.end("a1")
    await until(lambda: "a3" in functions.began)


async def test_tenants_that_wait_take_turns(functions: Functions) -> None:
    threads = StepThreads(2)
    start(threads, functions, "x0", "y0")
    await until(lambda: len(functions.began) == 2)  # x keeps its thread, the other one is for one after the other
    asked = start(threads, functions, "b1", "b2", "b3", "c1", "c2", "d1")
    await run_event_loop()
    functions.end("y0")
    for count in range(3, 9):
        await until(lambda count=count: len(functions.began) == count)  # type: ignore[misc]
        functions.end(functions.began[-1])
    assert functions.began[2:] == ["b1", "c1", "d1", "b2", "c2", "b3"]
    assert await asyncio.gather(*asked) == ["b1", "b2", "b3", "c1", "c2", "d1"]


async def test_a_thread_is_taken_until_its_function_ends_though_its_time_is_over(functions: Functions) -> None:
    threads = StepThreads(2)
    (late,) = start(threads, functions, "a1", timeout_s=0.01)
    with pytest.raises(TimeoutError):
        await late
    (waits,) = start(threads, functions, "a2", timeout_s=0.5)
    await asyncio.sleep(0.1)
    assert functions.began == ["a1"]
    functions.end("a1")
    await until(lambda: functions.began == ["a1", "a2"])
    functions.end("a2")
    assert await waits == "a2"


async def test_to_wait_for_a_thread_counts_as_no_time(functions: Functions) -> None:
    threads = StepThreads(2)
    start(threads, functions, "a1")
    await until(lambda: functions.began == ["a1"])
    (waits,) = start(threads, functions, "a2", timeout_s=0.3)
    await asyncio.sleep(0.5)
    assert not waits.done()
    functions.end("a1", "a2")
    assert await waits == "a2"


async def test_a_function_that_nobody_waits_for_any_more_keeps_its_thread(functions: Functions) -> None:
    threads = StepThreads(2)
    running, waiting = start(threads, functions, "a1", "a2")
    await until(lambda: functions.began == ["a1"])
    running.cancel()
    await run_event_loop()
    assert running.cancelled()
    assert functions.began == ["a1"]
    functions.end("a1", "a2")
    assert await waiting == "a2"


async def test_one_that_is_cancelled_while_it_waits_never_begins(functions: Functions) -> None:
    threads = StepThreads(2)
    _, cancelled, last = start(threads, functions, "a1", "a2", "a3")
    await until(lambda: functions.began == ["a1"])
    cancelled.cancel()
    functions.end_all()
    assert await last == "a3"
    assert functions.began == ["a1", "a3"]


async def test_one_that_is_cancelled_when_its_turn_has_come_gives_the_thread_back(functions: Functions) -> None:
    threads = StepThreads(2)
    first, second = start(threads, functions, "a1", "a2")
    await until(lambda: functions.began == ["a1"])
    first_ended = asyncio.Event()
    first.add_done_callback(lambda _: (second.cancel(), first_ended.set()))
    functions.end("a1")
    await first_ended.wait()
    await asyncio.wait([second])
    functions.end_all()
    assert await asyncio.wait_for(threads.run("a", lambda: "goes on", LONG_S), 5) == "goes on"


async def test_threads_are_given_back_while_those_who_wait_are_cancelled(functions: Functions) -> None:
    """A session is deleted in the moment in which functions end: no thread is lost, and other tenants go on."""
    threads = StepThreads(4)
    running = start(threads, functions, "a1", "a2", "a3", timeout_s=0.01)
    await asyncio.gather(*running, return_exceptions=True)  # their times are over, and they run on
    waiting = start(threads, functions, "a4", "a5", "a6")
    await run_event_loop()
    functions.end("a1", "a2", "a3")
    time.sleep(0.2)
    asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in waiting])
    await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)
    later = start(threads, functions, "b1", "b2", "b3", "c1")
    await until(lambda: sorted(functions.began[3:]) == ["b1", "b2", "b3", "c1"])
    functions.end_all()
    assert await asyncio.gather(*later) == ["b1", "b2", "b3", "c1"]
