"""Calls and tasks: what they state of themselves, and the size and digests of a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.errors import ResourceExhausted
from jaxctx.programs import tasks
from jaxctx.programs.engine_registry import PROMPT_BLOCK, EngineHandle
from jaxctx.programs.tasks import CallContext, Task
from jaxctx.programs.variables import Variable
from jaxctx.types import CallOutput, Criterion, TaskPhase
from tests.jaxctx.programs.builders import make_call
from tests.jaxctx.programs.scripted import ScriptedEngine, encode


def make_task(*prompt: str | Variable, **fields: Any) -> Task:
    """The only task of a call, whose prompt is measured."""
    task = make_call(prompt, **fields).tasks[0]
    task.measure_prompt()
    return task


def test_each_task_of_a_call_continues_the_one_before() -> None:
    call = make_call(["a"], ["b"], ["c"])
    assert [task.previous for task in call.tasks] == [None, *call.tasks[:2]]
    assert call.tasks[0].later_tasks == call.tasks[1:]
    assert call.tasks[2].later_tasks == []
    assert all(task.call is call for task in call.tasks)


def test_a_call_states_its_outputs_in_order() -> None:
    call = make_call(["a"], ["b"])
    info = call.info
    assert info.call_id == call.id
    assert [variable.variable_id for variable in info.outputs] == [task.output.id for task in call.tasks]
    assert make_call(["a"]).id != call.id


def test_inputs_are_the_variables_of_the_prompt_each_once() -> None:
    x, y = Variable("x"), Variable("y")
    (task,) = make_call(["a", y, x, "b", y]).tasks
    assert task.inputs == [y, x]


def test_a_prompt_has_the_texts_of_its_variables() -> None:
    x = Variable("x")
    (task,) = make_call(["a ", x, " b"]).tasks
    x.set("text")
    assert task.prompt == ["a ", "text", " b"]


def test_inputs_are_ready_once_all_are_set_and_the_task_before_is_done() -> None:
    x, y = Variable("x"), Variable("y")
    first, second = make_call([x], [y]).tasks
    assert not first.inputs_ready
    x.set("")
    assert first.inputs_ready
    y.set("")
    assert not second.inputs_ready
    first.phase = TaskPhase.STARTED
    assert not second.inputs_ready
    first.phase = TaskPhase.DONE
    assert second.inputs_ready


@pytest.mark.parametrize("phase", TaskPhase)
def test_a_task_has_ended_once_it_is_done_or_failed(phase: TaskPhase) -> None:
    (task,) = make_call(["a"]).tasks
    task.phase = phase
    assert task.ended == (phase in (TaskPhase.DONE, TaskPhase.FAILED))


def test_a_task_states_what_the_graph_shows() -> None:
    x = Variable("x")
    (task,) = make_call([x], function="strip").tasks
    info = task.info
    assert (info.call_id, info.output, info.inputs) == (task.call.id, task.output.id, [x.id])
    assert (info.phase, info.criterion, info.function) == (TaskPhase.IDLE, None, "strip")
    task.phase, task.criterion = TaskPhase.WAITING, Criterion.LATENCY
    task.engine_id, task.placement_reason = "e", "least impact"
    info = task.info
    assert (info.phase, info.criterion) == (TaskPhase.WAITING, Criterion.LATENCY)
    assert (info.engine_id, info.why) == ("e", "least impact")


def test_the_context_of_a_task_is_the_one_on_its_engine_that_has_its_prompt() -> None:
    (task,) = make_call(["a"]).tasks
    assert task.context_id == ""
    task.call.context = CallContext(EngineHandle("e", 1, ScriptedEngine(), encode, 4), "c")
    task.engine_id = "e"
    assert task.context_id == ""  # without its prompt yet
    task.prompt_appended = True
    assert task.info.context_id == task.context_id == "c"
    task.engine_id = "another"
    assert task.context_id == ""


# --- The size of a prompt


def test_a_prompt_is_measured_in_characters() -> None:
    assert make_task("é" * 5, "👍").prompt_characters == 6


def test_a_prompt_too_long_for_any_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MAX_PROMPT_CHARACTERS", 10)
    assert make_task("x" * 6, "y" * 4).prompt_characters == 10
    with pytest.raises(ResourceExhausted) as raised:
        make_task("x" * 6, "y" * 5)
    assert (raised.value.reason, raised.value.retry_after_s) == ("NEVER_FITS", None)


def test_tokens_are_estimated_from_the_call_the_prompt_and_the_output() -> None:
    task = make_task("x" * 31)
    assert task.estimate_tokens(100) == 10 + 100
    task.call.tokens = [1] * 7
    assert task.estimate_tokens(100) == 7 + 10 + 100
    task.prompt_appended = True  # it is among the call's tokens
    assert task.estimate_tokens(100) == 7 + 100


def test_the_output_counts_with_its_own_max_tokens() -> None:
    assert make_task("", settings=CallOutput(max_tokens=5)).estimate_tokens(100) == 5


# --- Digests of a prompt


def test_there_is_a_digest_for_each_whole_block() -> None:
    sizes = [0, PROMPT_BLOCK - 1, PROMPT_BLOCK, 3 * PROMPT_BLOCK + 1]
    counts = [len(make_task("x" * size).prompt_blocks) for size in sizes]
    assert counts == [0, 0, 1, 3]


def test_equal_beginnings_have_equal_digests_however_the_parts_are_cut() -> None:
    whole = "a" * PROMPT_BLOCK + "b" * PROMPT_BLOCK
    digests = make_task(whole + "c" * PROMPT_BLOCK).prompt_blocks
    assert make_task(whole[:10], whole[10:]).prompt_blocks == digests[:2]
    other = make_task("b" * PROMPT_BLOCK + "b" * PROMPT_BLOCK).prompt_blocks
    assert not set(other) & set(digests)  # of the second block too: digests are of everything up to it


def test_digests_differ_between_tenants() -> None:
    mine, other = (make_task("x" * PROMPT_BLOCK, tenant=tenant).prompt_blocks for tenant in ("a", "b"))
    assert mine != other


def test_only_the_beginning_of_a_prompt_has_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MAX_HASHED_CHARACTERS", 2 * PROMPT_BLOCK)
    assert len(make_task("x" * PROMPT_BLOCK, "y" * PROMPT_BLOCK * 5).prompt_blocks) == 2


def test_only_the_first_task_of_a_call_has_digests() -> None:
    first, second = make_call(["x" * PROMPT_BLOCK], ["y" * PROMPT_BLOCK]).tasks
    for task in (first, second):
        task.measure_prompt()
    assert len(first.prompt_blocks) == 1
    assert second.prompt_blocks == ()
