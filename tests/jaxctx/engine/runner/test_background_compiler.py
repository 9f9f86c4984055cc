"""The background compiler: it compiles what is left, one after the other, until it is stopped."""

import logging
import threading

import pytest

from jaxctx.engine.runner.background_compiler import BackgroundCompiler


class Runner:
    """In place of a runner: counts down, and waits for `may_go_on` before each compilation ends."""

    def __init__(self, left: int) -> None:
        self.functions_left = left
        self.under_way, self.may_go_on = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        self.fails = False

    def compile_next(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.under_way.set()
        assert self.may_go_on.wait(60)
        self.functions_left -= 1
        if self.fails:
            raise RuntimeError("the compiler failed")


def test_all_is_compiled_on_a_thread_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(3)
    runner.may_go_on.set()
    compiler = BackgroundCompiler(runner)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        compiler.start()
        compiler._thread.join(60)
    assert runner.functions_left == 0
    assert runner.threads == {"jaxctx-compile-later"}
    assert [record.getMessage() for record in caplog.records] == [
        "3 smaller steps were compiled after the start, in 0 s"
    ]
    compiler.stop()


def test_a_stop_waits_for_what_is_under_way_and_begins_nothing_more() -> None:
    runner = Runner(3)
    compiler = BackgroundCompiler(runner)  # type: ignore[arg-type]
    compiler.start()
    assert runner.under_way.wait(60)
    stopping = threading.Thread(target=compiler.stop)
    stopping.start()
    assert compiler._thread.is_alive()
    runner.may_go_on.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert not compiler._thread.is_alive()
    assert runner.functions_left == 2


def test_a_stop_before_the_start() -> None:
    BackgroundCompiler(Runner(1)).stop()  # type: ignore[arg-type]


def test_a_failure_is_logged_and_the_others_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(2)
    runner.fails = True
    runner.may_go_on.set()
    compiler = BackgroundCompiler(runner)  # type: ignore[arg-type]
    compiler.start()
    compiler._thread.join(60)
    assert runner.functions_left == 0
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "padded to larger" in caplog.records[0].getMessage()
