"""What must hold of programs: laziness, deduction, groups, order, prefixes, sharing, isolation, outputs, no fit."""

import asyncio

import pytest

from jaxctx.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from jaxctx.programs.dispatcher import Policy
from jaxctx.types import Criterion, TaskPhase, VariableState
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop, step, until
from tests.jaxctx.programs.scripted import ScriptedEngine

LONG = "You are a careful assistant who answers in one short sentence and never guesses. "


async def test_lazy() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    x = session.create_variable("x")
    a = call(session, "A of {{x}}: {{a}}", x=(x.id,), a=output("a"))["a"]
    b = call(session, "B of {{a}}: {{b}}", a=(a,), b=output("b"))["b"]
    call(session, "nobody asks {{c}}", c=output("c"))
    await run_event_loop()
    assert engine.log == []
    waiting = asyncio.create_task(ask(session, b))
    await run_event_loop()
    assert engine.log == []
    session.set_variable(x.id, "it")
    text = await waiting
    prompts = engine.did("generate")
    assert prompts == ["A of it: ", f"B of {session.variable(a).text}: "]
    assert text == session.variable(b).text == f"<{prompts[1][-12:]}>"
    await run_event_loop()
    assert engine.contexts == {}


async def test_an_output_may_be_asked_for_at_submission() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    a = call(session, "Say {{a}}", a=output("a", criterion=Criterion.LATENCY))["a"]
    assert await session.variable(a).wait() == "<Say >"
    assert engine.did("generate") == ["Say "]


@pytest.mark.parametrize(
    ("criterion", "loads"), [(Criterion.LATENCY, [4, 4, 0, 0]), (Criterion.THROUGHPUT, [8, 0, 0, 0])]
)
async def test_deduction(criterion: Criterion, loads: list[int]) -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    for engine in engines:
        engine.gate.clear()
    for i in range(8):
        session.request(call(session, f"Call {i}: {{{{o}}}}", o=output("o"))["o"], criterion)
    await run_event_loop()
    assert harness.loads() == loads


async def test_a_group_goes_together_and_its_consumer_after_the_last() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    for engine in engines:
        engine.gate.clear()
    maps = [call(session, f"{i} map {{{{o}}}}", o=output("o"))["o"] for i in range(16)]
    places = "".join(f"{{{{m{i}}}}} " for i in range(16))
    inputs = {f"m{i}": (variable,) for i, variable in enumerate(maps)}
    reduced = call(session, f"All: {places}{{{{o}}}}", **inputs, o=output("o"))["o"]
    asking = asyncio.create_task(ask(session, reduced))
    await run_event_loop()
    assert sorted(harness.loads()) == [0, 0, 0, 16]
    busy = next(engine for engine in engines if engine.running)
    assert len(busy.did("generate")) == 16
    for engine in engines:
        engine.gate.set()
    await asking
    log = [(text, engine.name) for engine in engines for text in engine.did("generate")]
    assert len(log) == 17
    last = next(text for text, _ in log if text.startswith("All: "))
    assert all(session.variable(variable).text in last for variable in maps)


async def test_a_group_that_fits_nowhere_is_split() -> None:
    engines = [ScriptedEngine(f"e{i}", max_batch=6) for i in range(2)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    maps = [call(session, f"{i} map {{{{o}}}}", o=output("o"))["o"] for i in range(16)]
    inputs = {f"m{i}": (variable,) for i, variable in enumerate(maps)}
    places = "".join(f"{{{{m{i}}}}} " for i in range(16))
    await ask(session, call(session, f"All: {places}{{{{o}}}}", **inputs, o=output("o"))["o"])
    assert all(engine.most_running == 6 for engine in engines)
    assert sum(len(engine.did("generate")) for engine in engines) == 17


@pytest.mark.parametrize("each_is_stripped", [False, True])
async def test_a_group_is_found_through_native_steps(each_is_stripped: bool) -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(2)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    for engine in engines:
        engine.gate.clear()
    maps = [call(session, f"{i} map {{{{o}}}}", o=output("o"))["o"] for i in range(6)]
    if each_is_stripped:
        maps = [step(session, "strip", text=(each,)) for each in maps]
        places = "".join(f"{{{{m{i}}}}}" for i in range(6))
        inputs = {f"m{i}": (each,) for i, each in enumerate(maps)}
        reduced = call(session, places + " {{o}}", **inputs, o=output("o"))["o"]
    else:
        joined = step(session, "join", **{str(i): (each,) for i, each in enumerate(maps)})
        reduced = call(session, "{{j}} {{o}}", j=(joined,), o=output("o"))["o"]
    asking = asyncio.create_task(ask(session, reduced))
    await run_event_loop()
    assert sorted(harness.loads()) == [0, 6]
    for engine in engines:
        engine.gate.set()
    await asking


async def test_application_order() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    session = harness.session()
    asked = []
    for i in range(4):
        a = call(session, f"A{i} {{{{o}}}}", o=output("o"))["o"]
        b = call(session, f"B{i} {{{{a}}}}: {{{{o}}}}", a=(a,), o=output("o"))["o"]
        asked.append(asyncio.create_task(ask(session, b)))
    await asyncio.gather(*asked)
    assert [text[:2] for text in engine.did("generate")] == ["A0", "B0", "A1", "B1", "A2", "B2", "A3", "B3"]
    assert engine.most_running == 1


async def test_without_application_order() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1), policy=Policy(app_order=False))
    session = harness.session()
    asked = []
    for i in range(2):
        a = call(session, f"A{i} {{{{o}}}}", o=output("o"))["o"]
        asked.append(
            asyncio.create_task(ask(session, call(session, f"B{i} {{{{a}}}}: {{{{o}}}}", a=(a,), o=output("o"))["o"]))
        )
    await asyncio.gather(*asked)
    assert [text[:2] for text in engine.did("generate")] == ["A0", "A1", "B0", "B1"]


PREFIXES = [f"{i} of four: {LONG}" for i in range(4)]


async def prefixed(harness: ProgramsHarness, order: list[int], criterion: Criterion) -> None:
    session = harness.session()
    for n, i in enumerate(order):
        session.request(call(session, PREFIXES[i] + "{{q}}? {{o}}", q=f"question {n}", o=output("o"))["o"], criterion)
    await run_event_loop()


async def test_calls_land_where_their_prefix_is() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    for node, prefix in zip(harness.nodes, PREFIXES, strict=True):  # each engine gets to hold one
        others = [each for each in harness.nodes if each is not node]
        for other in others:
            del harness.registry.handles[other.id]
        session = harness.session()
        await ask(session, call(session, prefix + "{{q}}? {{o}}", q="first", o=output("o"))["o"])
        for other in others:
            harness.registry.handles[other.id] = other
    for engine in engines:
        engine.gate.clear()
        engine.log.clear()
    await prefixed(harness, [3, 2, 1, 0] * 4, Criterion.THROUGHPUT)
    for engine, prefix in zip(engines, PREFIXES, strict=True):
        assert len(engine.running) == 4
        assert all(text.startswith(prefix) for text in engine.running.values())
        assert not any(prefix in text for text in engine.did("compute"))


async def test_cold_calls_of_one_prefix_land_together() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    for engine in engines:
        engine.gate.clear()
    await prefixed(harness, [0, 1, 2, 3] * 4, Criterion.LATENCY)
    assert harness.loads() == [4, 4, 4, 4]
    for engine in engines:
        assert len({text[:10] for text in engine.running.values()}) == 1
        assert len([text for text in engine.did("compute") if LONG in text]) == 1


async def test_without_grouping_cold_calls_of_one_prefix_scatter() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines, policy=Policy(same_prefix=False, cached_prefix=False))
    for engine in engines:
        engine.gate.clear()
    await prefixed(harness, [0, 1, 2, 3] * 4, Criterion.LATENCY)
    assert any(len({text[:10] for text in engine.running.values()}) > 1 for engine in engines)


async def test_the_longest_match_wins_over_any() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(2)]
    harness = ProgramsHarness(*engines)
    short, long = LONG, LONG + LONG.upper()
    session = harness.session()
    for node, text in zip(harness.nodes, (short, long), strict=True):
        other = next(each for each in harness.nodes if each is not node)
        del harness.registry.handles[other.id]
        await ask(session, call(session, text + "{{o}}", o=output("o"))["o"])
        harness.registry.handles[other.id] = other
    asked = call(session, "{{t}} and on {{o}}", t=long + "!", o=output("o"))["o"]
    await ask(session, asked)
    task = session.graph.producer(session.variable(asked))
    assert task.engine_id == "e1"
    assert task.placement_reason == f"holds {len(long) // 64 * 64} characters of its prompt"


async def test_sharing() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(), prefix_timeout_s=77.0)
    one, two = harness.session(), harness.session()
    asked = [
        ask(session, call(session, LONG + "{{q}}? {{o}}", q=question, o=output("o"))["o"])
        for session, question in ((one, "who"), (one, "what"), (two, "why"))
    ]
    texts = await asyncio.gather(*asked)
    assert texts == [f"<{(LONG + question + '? ')[-12:]}>" for question in ("who", "what", "why")]
    await run_event_loop()
    assert len([text for text in engine.did("compute") if LONG in text]) == 1
    assert list(map(len, engine.contexts.values())) == [64]  # the prefix's whole pages alone are left
    await harness.programs.delete("t", one.id)
    assert len(engine.contexts) == 1
    # Its time to live ends it; then the next call makes it again.
    engine.contexts.clear()
    assert (
        await ask(two, call(two, LONG + "{{q}}? {{o}}", q="how", o=output("o"))["o"]) == f"<{(LONG + 'how? ')[-12:]}>"
    )
    assert len([text for text in engine.did("compute") if LONG in text]) == 2
    await run_event_loop()
    assert len(engine.contexts) == 1


async def test_nothing_is_shared_between_tenants() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    for tenant in ("a", "b"):
        session = harness.session(tenant)
        await ask(session, call(session, LONG + "{{q}}? {{o}}", q="who", o=output("o"))["o"])
    assert len([text for text in engine.did("compute") if LONG in text]) == 2
    assert {tenant for tenant, _ in engine.contexts} == {"a", "b"}


async def test_isolation() -> None:
    """Equal templates with different inputs, all at once, in two sessions, give each the output of a run alone."""

    async def run(harness: ProgramsHarness, inputs: list[str]) -> list[str]:
        sessions = [harness.session(), harness.session()]
        return await asyncio.gather(
            *(
                ask(
                    sessions[n % 2],
                    call(sessions[n % 2], LONG + "{{q}}{{a}} then {{b}}", q=q, a=output("a"), b=output("b"))["b"],
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


async def test_many_outputs_continue_one_sequence() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(answer=lambda text: f"[{len(text)}]"))
    session = harness.session()
    template = "Q: {{a}}{{b}} and {{x}}{{x}} so {{c}} the rest"
    outputs = call(session, template, a=output("a"), b=output("b"), x="X", c=output("c"))
    assert await ask(session, outputs["c"]) == "[20]"
    assert engine.did("generate") == ["Q: ", "Q: [3]", "Q: [3][6] and XX so "]
    assert [session.variable(outputs[each]).text for each in "abc"] == ["[3]", "[6]", "[20]"]
    assert len(engine.did("create")) == 1


async def test_an_output_asked_for_later_continues_from_the_tokens() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    outputs = call(session, "Q: {{a}} and {{b}}", a=output("a"), b=output("b"))
    await ask(session, outputs["a"])
    await run_event_loop()
    assert engine.contexts == {}  # nobody asked for more
    assert session.variable(outputs["b"]).state is VariableState.UNSET
    await ask(session, outputs["b"])
    assert engine.did("generate")[1] == "Q: <Q: > and "


@pytest.mark.parametrize(
    ("template", "parameters", "field"),
    [
        ("{{o}} first", {"o": output("o")}, "template"),
        ("no places", {}, "parameters"),
        ("{{x}}", {"x": "X"}, "parameters"),
        ("a {{x}}{{o}}", {"o": output("o")}, "template"),
        ("a {{o}}", {"o": output("o"), "x": "X"}, "parameters[1].name"),
        ("a {{o}}{{o}}", {"o": output("o")}, "template"),
        ("a {{o}}", {"o": output("o", max_tokens=20_000)}, "parameters[0].output.max_tokens"),
    ],
)
async def test_bad_templates(template: str, parameters: dict, field: str) -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(InvalidArgument) as error:
        call(session, template, **parameters)
    assert [each.field for each in error.value.violations] == [field]
    assert session.variables == {}
    assert session.calls == {}


async def test_braces_that_are_no_place_are_text() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    await ask(session, call(session, '{"a": {"b": {{ 1 }}}} {{o}}', o=output("o"))["o"])
    assert engine.did("generate") == ['{"a": {"b": {{ 1 }}}} ']


async def test_set_once() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    x = session.create_variable("x")
    session.set_variable(x.id, "")
    with pytest.raises(AlreadyExists):
        session.set_variable(x.id, "again")
    o = call(session, "{{x}}say {{o}}", x=(x.id,), o=output("o"))["o"]
    with pytest.raises(FailedPrecondition):
        session.set_variable(o, "mine")


async def test_no_fit() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(NotFound) as error:
        call(session, "say {{o}}", model_id="none", o=output("o"))
    assert error.value.reason == "MODEL_NOT_FOUND"


async def test_a_failed_input_fails_what_needs_it() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    a = call(session, "A {{o}}", o=output("o"))["o"]
    b = call(session, "{{a}} B {{o}}", a=(a,), o=output("o"))["o"]
    engine.failure = ResourceExhausted("never", reason="NEVER_FITS")
    with pytest.raises(ResourceExhausted):
        await ask(session, b)
    engine.failure = None
    with pytest.raises(ResourceExhausted):
        await ask(session, call(session, "{{b}} C {{o}}", b=(b,), o=output("o"))["o"])


async def test_failing_a_very_long_chain() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    first = last = session.create_variable("x").id
    for _ in range(3000):
        last = call(session, "{{x}}: {{o}}", x=(last,), o=output("o"))["o"]
    session.request(last, Criterion.LATENCY)
    session.cancel(next(iter(session.calls)))
    with pytest.raises(Cancelled):
        await session.variable(last).wait()
    assert session.variable(first).state is VariableState.UNSET


async def test_cancel_while_it_runs() -> None:
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


async def test_deletion_returns_every_context() -> None:
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


async def test_an_idle_session_ends_and_a_working_one_does_not() -> None:
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


async def test_a_stream_has_every_part_once() -> None:
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


async def test_a_stronger_request_upgrades_what_has_not_started() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    session = harness.session()
    engine.gate.clear()
    first = call(session, "one {{o}}", o=output("o"))["o"]
    second = call(session, "two {{o}}", o=output("o"))["o"]
    session.request(first, Criterion.THROUGHPUT)
    session.request(second, Criterion.THROUGHPUT)
    await run_event_loop()
    session.request(second, Criterion.LATENCY)
    session.request(second, Criterion.THROUGHPUT)
    assert session.graph.producer(session.variable(second)).criterion is Criterion.LATENCY
    assert session.graph.producer(session.variable(first)).criterion is Criterion.THROUGHPUT
    engine.gate.set()
    await session.variable(second).wait()


async def test_tenants_take_turns() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    many, few = harness.session("many"), harness.session("few")
    engine.gate.clear()
    for i in range(6):
        many.request(call(many, f"m{i} {{{{o}}}}", o=output("o"))["o"], Criterion.THROUGHPUT)
    await run_event_loop()
    asked = [call(few, f"f{i} {{{{o}}}}", o=output("o"))["o"] for i in range(2)]
    for each in asked:
        few.request(each, Criterion.THROUGHPUT)
    engine.gate.set()
    await until(lambda: len(engine.did("generate")) == 8)
    assert [text[:2] for text in engine.did("generate")] == ["m0", "f0", "m1", "f1", "m2", "m3", "m4", "m5"]


async def test_full_engines_say_when_to_come_again() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure = ResourceExhausted("queue", reason="QUEUE_FULL", retry_after_s=0.01)
    asking = asyncio.create_task(ask(session, call(session, "say {{o}}", o=output("o"))["o"]))
    await until(lambda: len(engine.did("create")) > 2)
    engine.failure = None
    assert await asking == "<say >"


async def test_quotas() -> None:
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


async def test_the_graph_tells_why() -> None:
    harness = ProgramsHarness(ScriptedEngine())
    session = harness.session()
    o = call(session, "say {{o}}", o=output("o"))["o"]
    task = session.graph.producer(session.variable(o))
    assert task.phase is TaskPhase.IDLE
    assert task.placement_reason == ""
    await ask(session, o)
    assert (task.phase, task.engine_id, task.placement_reason) == (TaskPhase.DONE, "e", "least impact")
