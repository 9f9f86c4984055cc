"""Semantic variables: set or failed once, and what waiting and reading give meanwhile."""

import asyncio

import pytest

from jaxctx.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    ResourceExhausted,
)
from jaxctx.programs.variables import Variable
from jaxctx.types import Criterion, VariableState
from tests.jaxctx.programs.conftest import ProgramsHarness, call, output, run_event_loop
from tests.jaxctx.programs.scripted import ScriptedEngine


async def test_a_variable_is_set_once_and_only_by_its_owner() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    x = session.create_variable("x")
    session.set_variable(x.id, "")
    with pytest.raises(AlreadyExists):
        session.set_variable(x.id, "again")
    o = call(session, "{{x}}say {{o}}", x=(x.id,), o=output("o"))["o"]
    with pytest.raises(FailedPrecondition):
        session.set_variable(o, "mine")


async def test_early_and_late_readers_get_every_part_once() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(answer=lambda text: "abcdefg"))
    session = harness.session()
    engine.gate.clear()
    o = call(session, "say {{o}}", o=output("o"))["o"]
    variable = session.request(o, Criterion.TIME_TO_FIRST_TOKEN)

    async def read() -> list[str]:
        return [part async for part in variable.read()]

    early = asyncio.create_task(read())
    await run_event_loop()
    engine.gate.set()
    parts = await early
    assert "".join(parts) == "abcdefg"
    assert len(parts) > 1
    assert await read() == ["abcdefg"]


# --- A variable alone


async def read_all(variable: Variable) -> list[str]:
    return [part async for part in variable.read()]


def test_a_new_variable_is_unset_and_has_an_id_of_its_own() -> None:
    variable, other = Variable("x", "what it is"), Variable("x")
    assert (variable.state, variable.text, variable.error) == (VariableState.UNSET, "", None)
    assert variable.id != other.id
    info = variable.info
    assert (info.variable_id, info.name, info.description) == (variable.id, "x", "what it is")
    assert (info.state, info.text, info.error_reason, info.error_message) == (VariableState.UNSET, "", "", "")


async def test_everybody_who_waits_gets_the_text() -> None:
    variable = Variable("x")
    waiting = [asyncio.create_task(variable.wait()) for _ in range(3)]
    await run_event_loop()
    assert not any(each.done() for each in waiting)
    variable.set("text")
    assert await asyncio.gather(*waiting) == ["text"] * 3
    assert await variable.wait() == "text"
    assert variable.info.state is VariableState.SET


async def test_an_empty_text_is_a_text() -> None:
    variable = Variable("x")
    variable.set("")
    assert await variable.wait() == ""
    assert await read_all(variable) == []


async def test_a_reader_gets_each_part_as_it_comes() -> None:
    variable, parts = Variable("x"), []

    async def read() -> None:
        async for part in variable.read():
            parts.append(part)

    reading = asyncio.create_task(read())
    await run_event_loop()
    for count, part in enumerate(["a", "bc", "d"], 1):
        variable.append(part)
        await run_event_loop()
        assert len(parts) == count
    assert not reading.done()
    variable.set("abcd")
    await reading
    assert parts == ["a", "bc", "d"]


async def test_a_slow_reader_gets_several_parts_as_one() -> None:
    variable = Variable("x")
    variable.append("a")
    parts = variable.read()
    assert await anext(parts) == "a"
    variable.append("b")
    variable.append("c")
    variable.set("abc")
    assert [part async for part in parts] == ["bc"]


async def test_a_failed_variable_raises_its_error_to_everybody_after_the_parts_that_came() -> None:
    variable = Variable("x")
    variable.append("part")
    early = variable.read()
    assert await anext(early) == "part"
    variable.fail(ResourceExhausted("full", reason="QUOTA"))
    with pytest.raises(ResourceExhausted):
        await anext(early)
    with pytest.raises(ResourceExhausted):
        await variable.wait()
    late = variable.read()
    assert await anext(late) == "part"
    info = variable.info
    assert (info.state, info.error_reason, info.error_message) == (VariableState.FAILED, "QUOTA", "full")


async def test_frames_of_one_reader_do_not_gather_in_the_error_of_all() -> None:
    variable = Variable("x")
    variable.fail(Cancelled("over"))
    depths = []
    for _ in range(3):
        with pytest.raises(Cancelled) as raised:
            await variable.wait()
        depths.append(len(raised.traceback))
    assert depths[0] == depths[1] == depths[2]


def test_a_variable_that_is_set_or_has_failed_fails_no_more() -> None:
    is_set, failed = Variable("x"), Variable("y")
    is_set.set("text")
    is_set.fail(Cancelled("late"))
    assert (is_set.state, is_set.error) == (VariableState.SET, None)
    first = Cancelled("first")
    failed.fail(first)
    failed.fail(Cancelled("second"))
    assert failed.error is first


def test_what_may_be_set() -> None:
    Variable("x").raise_if_not_settable()
    output = Variable("o", is_output=True)
    with pytest.raises(FailedPrecondition):
        output.raise_if_not_settable()
    failed = Variable("x")
    failed.fail(Cancelled("over"))
    with pytest.raises(AlreadyExists, match=r"^the variable is failed$"):
        failed.raise_if_not_settable()
