"""Sessions: isolation, quotas, time to live, and the end of everything that runs in one."""

import asyncio
from typing import Any

import pytest

from jaxctx.errors import (
    AlreadyExists,
    Cancelled,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jaxctx.programs.sessions import Programs
from jaxctx.types import CallOutput, Criterion, OutputFormat, Parameter, SubmitCallRequest
from tests.jaxctx.programs.conftest import Clock, ProgramsHarness, ask, call, output, run_event_loop, until
from tests.jaxctx.programs.scripted import ScriptedEngine

LONG_PREFIX = "You are a careful assistant who answers in one short sentence and never guesses. "


async def test_sessions_and_tenants_are_isolated() -> None:
    """Equal templates with different inputs, all at once, in two sessions, give each the output of a run alone."""

    async def run(harness: ProgramsHarness, inputs: list[str]) -> list[str]:
        sessions = [harness.session(), harness.session()]
        return await asyncio.gather(
            *(
                ask(
                    sessions[n % 2],
                    call(sessions[n % 2], LONG_PREFIX + "{{q}}{{a}} then {{b}}", q=q, a=output("a"), b=output("b"))[
                        "b"
                    ],
                )
                for n, q in enumerate(inputs)
            )
        )

    inputs = [f"input {i}" for i in range(12)]
    together = await run(ProgramsHarness(ScriptedEngine(), ScriptedEngine("f")), inputs)
    alone = [(await run(ProgramsHarness(ScriptedEngine()), [each]))[0] for each in inputs]
    assert together == alone
    assert len(set(together)) == 12
    harness = ProgramsHarness(ScriptedEngine())
    mine, other = harness.session(), harness.session()
    variable = mine.create_variable("x", text="secret")
    with pytest.raises(NotFound) as error:
        other.variable(variable.id)
    assert error.value.reason == "VARIABLE_NOT_FOUND"
    with pytest.raises(NotFound):
        harness.programs.session("somebody else", mine.id)


async def test_a_call_of_a_model_that_there_is_not_is_refused() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(NotFound) as error:
        call(session, "say {{o}}", model_id="none", o=output("o"))
    assert error.value.reason == "MODEL_NOT_FOUND"


async def test_a_call_that_is_cancelled_while_it_runs_gives_back_its_context() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.gate.clear()
    outputs = call(session, "A {{a}} B {{b}}", a=output("a"), b=output("b"))
    asking = asyncio.create_task(ask(session, outputs["b"]))
    await until(lambda: len(engine.running) == 1)
    session.cancel(next(iter(session.calls)))
    with pytest.raises(Cancelled):
        await asking
    await run_event_loop()
    assert engine.running == {}
    assert engine.contexts == {}
    assert harness.loads() == [0]


async def test_deleting_a_session_gives_back_every_context() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.gate.clear()
    ids = [call(session, f"{i} {{{{o}}}}", o=output("o"))["o"] for i in range(5)]
    asking = [asyncio.create_task(ask(session, each)) for each in ids]
    late = asyncio.create_task(session.create_variable("never set").wait())
    await until(lambda: len(engine.running) == 4)
    await harness.programs.delete("t", session.id)
    results = await asyncio.gather(*asking, late, return_exceptions=True)
    assert all(isinstance(each, Cancelled) for each in results)
    await run_event_loop()
    assert engine.contexts == {}
    assert engine.running == {}
    with pytest.raises(NotFound):
        harness.programs.session("t", session.id)


async def test_deleting_a_session_does_not_wait_for_contexts_of_others() -> None:
    """They may be on an engine that answers nobody."""
    engine = ScriptedEngine("a")
    harness = ProgramsHarness(engine)
    theirs, mine = harness.session("theirs"), harness.session("mine")
    assert await ask(theirs, call(theirs, "x{{o}}", o=output("o"))["o"])
    engine.gate.clear()
    theirs.request(call(theirs, "x{{o}}", o=output("o"))["o"], Criterion.LATENCY)
    await run_event_loop()
    engine.silent = True
    deleting = asyncio.create_task(harness.programs.delete("theirs", theirs.id))
    await run_event_loop()
    assert not deleting.done()
    await asyncio.wait_for(harness.programs.delete("mine", mine.id), 5)
    assert not deleting.done()
    deleting.cancel()


async def test_sessions_of_others_are_not_looked_at(programs: Programs) -> None:
    """There may be thousands of them."""
    for _ in range(3):
        programs.create(Unordered("theirs"), 60)
    mine = programs.create("mine", 60, "b")
    mine.create_variable("v", "", "text")
    other = programs.create("mine", 60, "a")
    assert programs.sessions("mine") == [other, mine]


class Unordered(str):
    """A tenant that may not be put in an order with others."""

    def __lt__(self, other: str) -> bool:
        raise AssertionError("sessions of all tenants are sorted")

    __gt__ = __lt__


async def test_an_idle_session_ends_and_a_running_one_does_not() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    watching = asyncio.create_task(harness.programs.watch())
    idle, working = harness.session(ttl_s=10.0), harness.session(ttl_s=10.0)
    engine.gate.clear()
    o = call(working, "say {{o}}", o=output("o"))["o"]
    asking = asyncio.create_task(ask(working, o))
    await run_event_loop()
    harness.clock.now += 11
    await until(lambda: harness.programs.sessions("t") == [working])
    with pytest.raises(NotFound):
        harness.programs.session("t", idle.id)
    engine.gate.set()
    await asking
    watching.cancel()


async def test_a_session_has_a_quota_of_variables_and_a_tenant_one_of_text() -> None:
    harness = ProgramsHarness(ScriptedEngine())
    session = harness.session()
    for i in range(4096):
        session.create_variable(str(i))
    with pytest.raises(ResourceExhausted) as error:
        session.create_variable("one too many")
    assert error.value.reason == "QUOTA"
    other = harness.session()
    for _ in range(32):
        other.create_variable("x", text="x" * (2 << 20))
    with pytest.raises(ResourceExhausted):
        other.create_variable("x", text="x")
    with pytest.raises(AlreadyExists):
        harness.programs.create("t", 1.0, other.id)


# --- Programs and sessions without calls of an engine


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def programs(clock: Clock) -> Programs:
    return Programs(clock)


async def test_an_id_is_chosen_by_the_caller_or_at_random(programs: Programs) -> None:
    chosen = programs.create("t", 60.0, "mine")
    others = {programs.create("t", 60.0).id for _ in range(2)}
    assert chosen.id == "mine"
    assert len(others) == 2
    assert programs.session("t", "mine") is chosen
    with pytest.raises(AlreadyExists):
        programs.create("t", 60.0, "mine")
    assert programs.create("another tenant", 60.0, "mine") is not chosen


async def test_sessions_are_listed_by_tenant_in_the_order_of_their_ids(programs: Programs) -> None:
    b, a, _ = (programs.create(tenant, 60.0, name) for tenant, name in (("t", "b"), ("t", "a"), ("u", "c")))
    assert programs.sessions("t") == [a, b]


async def test_a_tenant_has_up_to_a_hundred_sessions(programs: Programs) -> None:
    for _ in range(100):
        programs.create("t", 60.0)
    with pytest.raises(ResourceExhausted) as raised:
        programs.create("t", 60.0)
    assert (raised.value.reason, raised.value.retry_after_s) == ("QUOTA", 5.0)
    programs.create("u", 60.0)


async def test_the_time_to_live_begins_again_with_every_use(programs: Programs, clock: Clock) -> None:
    session = programs.create("t", 10.0)
    for _ in range(3):
        clock.now += 9
        assert programs.session("t", session.id) is session
    clock.now += 10
    with pytest.raises(NotFound) as raised:
        programs.session("t", session.id)
    assert raised.value.reason == "SESSION_NOT_FOUND"
    assert programs.sessions("t") == []


async def test_variables_of_an_ended_session_fail(programs: Programs) -> None:
    session = programs.create("t", 10.0)
    waiting = asyncio.create_task(session.create_variable("x").wait())
    await run_event_loop()
    await programs.delete("t", session.id)
    with pytest.raises(Cancelled, match="the session was deleted"):
        await waiting


async def test_a_session_states_what_is_in_it() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session(ttl_s=7.0)
    engine.gate.clear()
    x = session.create_variable("x")
    o = call(session, "say {{x}} {{o}}", x=(x.id,), o=output("o"))["o"]
    info = session.info
    assert (info.session_id, info.ttl_s, info.variables, info.calls, info.started) == (session.id, 7.0, 2, 1, 0)
    session.request(o, Criterion.LATENCY)
    session.set_variable(x.id, "it")
    assert (session.info.started, session.is_running) == (1, True)
    session.cancel(next(iter(session.calls)))
    assert (session.info.started, session.is_running) == (0, False)


async def test_what_a_session_does_not_know_is_not_found(programs: Programs) -> None:
    session = programs.create("t", 60.0)
    for use in (session.variable, lambda name: session.set_variable(name, ""), session.cancel):
        with pytest.raises(NotFound) as raised:
            use("nothing")
        assert raised.value.reason in ("VARIABLE_NOT_FOUND", "CALL_NOT_FOUND")


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        (
            {"function": "strip", "parameters": [Parameter(name="text", text="a"), Parameter(name="text", text="b")]},
            "parameters[1].name",
        ),
        (
            {"function": "strip", "parameters": [Parameter(name="o", output=CallOutput(max_tokens=5))]},
            "parameters[0].output",
        ),
        (
            {"template": "say {{o}}", "parameters": [Parameter(name="o", output=CallOutput(max_tokens=2**30))]},
            "parameters[0].output.max_tokens",
        ),
    ],
    ids=["two of a name", "settings of a function", "too many tokens"],
)
async def test_parameters_that_cannot_be_are_refused_by_field(request_fields: Any, field: str) -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(InvalidArgument) as raised:
        session.submit(SubmitCallRequest(**request_fields))
    assert [violation.field for violation in raised.value.violations] == [field]
    assert (session.calls, session.variables, session.text_bytes) == ({}, {}, 0)


async def test_texts_count_in_bytes_wherever_they_are_given() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    x = session.create_variable("x", "é", "ab")
    assert session.text_bytes == 4
    y = session.create_variable("y")
    session.set_variable(y.id, "é")
    assert session.text_bytes == 6
    call(session, "say {{x}}{{t}}{{o}}", x=(x.id,), t="1234", o=output("o", stop=["é", "."]))
    assert session.text_bytes == 6 + len("say {{x}}{{t}}{{o}}") + 4 + 3
    before = session.text_bytes
    call(session, "say {{o}}", o=output("o", output_format=OutputFormat(choices=["é", "b"])))
    call(session, "say {{o}}", o=output("o", output_format=OutputFormat(json_schema="{}")))
    call(session, "say {{o}}", o=output("o", output_format=OutputFormat(json_object=True)))
    assert session.text_bytes == before + 3 * len("say {{o}}") + 3 + 2


async def test_a_text_that_never_fits_is_not_to_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxctx.programs.sessions.MAX_TEXT_BYTES", 10)
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(ResourceExhausted) as raised:
        session.create_variable("x", text="x" * 11)
    assert raised.value.retry_after_s is None
    session.create_variable("x", text="x" * 10)
    with pytest.raises(ResourceExhausted) as raised:
        session.create_variable("x", text="x")
    assert raised.value.retry_after_s == 5.0


async def test_a_draining_server_takes_no_calls_and_waits_for_those_that_run() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.gate.clear()
    asking = asyncio.create_task(ask(session, call(session, "say {{o}}", o=output("o"))["o"]))
    await run_event_loop()
    draining = asyncio.create_task(harness.programs.drain())
    await run_event_loop()
    with pytest.raises(Unavailable) as raised:
        call(session, "say {{o}}", o=output("o"))
    assert raised.value.reason == "DRAINING"
    assert not draining.done()
    engine.gate.set()
    await asking
    await asyncio.wait_for(draining, 5)


async def test_when_watching_stops_every_session_ends(programs: Programs) -> None:
    session = programs.create("t", 60.0)
    waiting = asyncio.create_task(session.create_variable("x").wait())
    watching = asyncio.create_task(programs.watch())
    await run_event_loop()
    watching.cancel()
    with pytest.raises(Unavailable) as raised:
        await asyncio.wait_for(waiting, 5)
    assert raised.value.reason == "NOT_SERVING"
    assert programs.sessions("t") == []


async def test_the_tasks_of_a_session_are_in_the_order_of_their_calls() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    first = call(session, "a {{x}} b {{y}}", x=output("x"), y=output("y"))
    second = call(session, "c {{z}}", z=output("z"))
    assert [task.output.id for task in session.tasks()] == [first["x"], first["y"], second["z"]]


async def test_a_prompt_that_is_too_long_for_any_engine_fails_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxctx.programs.tasks.MAX_PROMPT_CHARACTERS", 10)
    session = ProgramsHarness(ScriptedEngine()).session()
    o = call(session, "more than ten {{o}}", o=output("o"))["o"]
    with pytest.raises(ResourceExhausted) as raised:
        await ask(session, o)
    assert raised.value.reason == "NEVER_FITS"
