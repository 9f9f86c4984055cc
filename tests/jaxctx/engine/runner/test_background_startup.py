"""What is left of a start: steps are compiled one after the other, then memory is taken, until it is stopped."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from jaxctx.engine.runner.background_startup import BackgroundStartup


class Runner:
    """In place of a runner: counts down, and waits for `may_go_on` before each compilation ends."""

    def __init__(self, left: int) -> None:
        self.functions_left = left
        self.under_way, self.may_go_on = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        self.fails = False
        self.parts_taken = 0

    def compile_next(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.under_way.set()
        assert self.may_go_on.wait(60)
        self.functions_left -= 1
        if self.fails:
            raise RuntimeError("the compiler failed")

    def take_memory(self) -> Iterator[None]:
        assert self.functions_left == 0  # steps save more time than memory
        for _ in range(3):
            self.parts_taken += 1
            self.under_way.set()
            assert self.may_go_on.wait(60)
            yield


def test_all_is_compiled_on_a_thread_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(3)
    runner.may_go_on.set()
    startup = BackgroundStartup(runner)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        startup.start()
        startup._thread.join(60)
    assert runner.functions_left == 0
    assert runner.parts_taken == 3
    assert runner.threads == {"jaxctx-start-later"}
    assert [record.getMessage() for record in caplog.records] == [
        "3 smaller steps were compiled after the start, in 0 s"
    ]
    startup.stop()


def test_a_stop_waits_for_what_is_under_way_and_begins_nothing_more() -> None:
    runner = Runner(3)
    startup = BackgroundStartup(runner)  # type: ignore[arg-type]
    startup.start()
    assert runner.under_way.wait(60)
    stopping = threading.Thread(target=startup.stop)
    stopping.start()
    assert startup._thread.is_alive()
    runner.may_go_on.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert not startup._thread.is_alive()
    assert runner.functions_left == 2
    assert runner.parts_taken == 0


def test_a_stop_takes_no_more_memory() -> None:
    runner = Runner(0)
    startup = BackgroundStartup(runner)  # type: ignore[arg-type]
    startup.start()
    assert runner.under_way.wait(60)
    stopping = threading.Thread(target=startup.stop)
    stopping.start()
    while not startup._stopping:
        time.sleep(0.001)
    runner.may_go_on.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert runner.parts_taken == 1


def test_a_stop_before_the_start() -> None:
    BackgroundStartup(Runner(1)).stop()  # type: ignore[arg-type]


def test_a_failure_is_logged_and_the_others_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(2)
    runner.fails = True
    runner.may_go_on.set()
    startup = BackgroundStartup(runner)  # type: ignore[arg-type]
    startup.start()
    startup._thread.join(60)
    assert runner.functions_left == 0
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "padded to larger" in caplog.records[0].getMessage()
