"""Trials of grammars: what is good, what is wrong, and what crashes or never ends, each in its time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import llguidance
import pytest

from jaxctx.engine.grammar.compiler import LIMITS
from jaxctx.engine.grammar.trial import TOO_MUCH, GrammarTrials
from jaxctx.errors import ResourceExhausted, Unavailable
from tests.echo import echo_text
from tests.jaxctx.engine.grammar.hostile import ENDLESS, rule_chain

GOOD = llguidance.LLMatcher.grammar_from_regex("[a-c]{3}")


def setup() -> dict[str, object]:
    text = echo_text()
    return {"tokenizer": text.tokenizer.to_json(), "eos_ids": text.eos_ids, "limits": LIMITS}


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(setup, timeout_s=1.0)
    yield made
    made.close()


def pids(trials: GrammarTrials) -> set[int]:
    return {process._process.pid for process in trials._all}


def test_one_process_tries_one_grammar_after_the_other(trials: GrammarTrials) -> None:
    trials.warm_up()
    first = pids(trials)
    assert trials.try_grammar(GOOD) == ""
    assert "regex parse error" in trials.try_grammar(llguidance.LLMatcher.grammar_from_regex("[a"))
    assert trials.try_grammar("start: start") == "it matches no text"
    assert trials.try_grammar(GOOD) == ""
    assert pids(trials) == first
    assert len(first) == 1


def test_a_grammar_that_crashes_its_process_is_refused_and_the_next_one_is_not(trials: GrammarTrials) -> None:
    assert trials.try_grammar(rule_chain(4000)) == TOO_MUCH
    assert pids(trials) == set()
    assert trials.try_grammar(GOOD) == ""


def test_a_grammar_that_does_not_end_is_refused_in_time_and_its_process_is_gone(trials: GrammarTrials) -> None:
    trials.warm_up()
    (pid,) = pids(trials)
    grammar = ENDLESS["a conjunction of many"].grammar
    assert grammar is not None
    begin = time.monotonic()
    assert trials.try_grammar(grammar) == TOO_MUCH
    assert time.monotonic() - begin < 3
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert trials.try_grammar(GOOD) == ""


def test_a_process_that_somebody_ended_is_replaced(trials: GrammarTrials) -> None:
    trials.warm_up()
    (pid,) = pids(trials)
    os.kill(pid, signal.SIGKILL)
    (process,) = trials._all
    process._process.wait()
    assert trials.try_grammar(GOOD) == ""
    assert pids(trials) != {pid}


def test_closing_ends_a_trial_at_once(trials: GrammarTrials) -> None:
    trials.warm_up()
    errors: list[Unavailable] = []
    grammar = ENDLESS["a conjunction of many"].grammar or ""

    def try_it() -> None:
        try:
            trials.try_grammar(grammar)
        except Unavailable as error:
            errors.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    while not trials._idle.empty():  # until it has the process
        time.sleep(0.001)
    trials.close()
    thread.join(5)
    assert [error.reason for error in errors] == ["NOT_SERVING"]  # and not that the grammar is wrong
    with pytest.raises(Unavailable):
        trials.try_grammar(GOOD)


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_process_is_the_first_to_go_when_memory_runs_out(trials: GrammarTrials) -> None:
    trials.warm_up()
    (pid,) = pids(trials)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


def test_a_process_that_cannot_be_started(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refused)
        with pytest.raises(ResourceExhausted) as failed:  # Unavailable would say that the engine is lost
            trials.try_grammar(GOOD)
    assert (failed.value.reason, failed.value.retry_after_s) == ("QUEUE_FULL", 1.0)
    assert trials.try_grammar(GOOD) == ""


def test_a_setup_that_the_process_cannot_use_is_the_servers_fault() -> None:
    trials = GrammarTrials(lambda: {**setup(), "tokenizer": "{}"})
    with pytest.raises(ResourceExhausted):
        trials.try_grammar(GOOD)
    assert pids(trials) == set()
