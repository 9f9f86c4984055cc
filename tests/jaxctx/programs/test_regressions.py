"""Corners that a review found: time that is over, tenants in each other's way, losses at odd moments."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.errors import Cancelled, DeadlineExceeded, ResourceExhausted, Unavailable
from jaxctx.programs import dispatcher, executor
from jaxctx.types import CreateContextRequest, Criterion, SubmitCallRequest
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop, until
from tests.jaxctx.programs.scripted import ScriptedEngine, encode
from tests.server.fake_engine import STATS


async def test_time_is_over_for_a_task_whose_input_never_came() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    x = session.create_variable("x")
    parameters = [replace(output("x"), output=None, variable_id=x.id), output("o")]
    request = SubmitCallRequest(template="{{x}} and {{o}}", parameters=parameters, timeout_s=0.05)
    with pytest.raises(DeadlineExceeded):
        await ask(session, session.submit(request).tasks[0].output.id)
    session.set_variable(x.id, "late")
    await run_event_loop()
    assert engine.log == []


async def test_nobody_waits_for_a_prefix_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    rewind, may_rewind = engine.rewind, asyncio.Event()

    async def rewound(caller: Caller, context_id: str, to: int) -> None:
        await may_rewind.wait()
        await rewind(caller, context_id, to)

    monkeypatch.setattr(engine, "rewind", rewound)
    template = "a prefix that is long enough for a page of its own, and then some more: {{o}}"
    for _ in range(2):
        assert await ask(session, call(session, template, o=output("o"))["o"])
    assert harness.loads() == [0]
    await run_event_loop()
    assert len(engine.contexts) == 1  # that of the first is to be kept, and the other's is closed
    may_rewind.set()
    await run_event_loop()
    assert list(map(len, engine.contexts.values())) == [64]


async def test_calls_that_end_at_once_keep_one_prefix() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    template = "a prefix that is long enough for a page of its own, and then some more: {{o}}"
    for _ in range(2):
        ids = [call(session, template, o=output("o"))["o"] for _ in range(3)]
        await asyncio.gather(*(ask(session, each) for each in ids))
        await run_event_loop()
        assert list(map(len, engine.contexts.values())) == [64]
        engine.contexts.clear()  # its time to live is over, which the next ones find at once


async def test_the_latest_used_prefixes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_PREFIXES", 2)
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    for used in "abacab":
        assert await ask(session, call(session, f"{used * 80} {{{{o}}}}", o=output("o"))["o"])
        await run_event_loop()
        assert [text[1:4] for *_, text in harness.nodes[0].prefixes][-1] == used * 3
    assert {text[0] for *_, text in harness.nodes[0].prefixes} == {"a", "b"}
    kept = [chr(tokens[-1]) for tokens in engine.contexts.values()]
    assert sorted(kept) == ["a", "b"]  # the others are closed


async def test_a_tenant_keeps_so_many_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_TENANT_PREFIXES", 2)
    harness = ProgramsHarness(engine := ScriptedEngine())
    for tenant, used in (("other", "x"), ("t", "a"), ("t", "b"), ("t", "a"), ("t", "c")):
        session = harness.session(tenant)
        assert await ask(session, call(session, f"{used * 80} {{{{o}}}}", o=output("o"))["o"])
        await run_event_loop()
    kept = [(tenant, chr(tokens[-1])) for (tenant, _), tokens in engine.contexts.items()]
    assert sorted(kept) == [("other", "x"), ("t", "a"), ("t", "c")]
    assert {(tenant, text[0]) for tenant, _, text in harness.nodes[0].prefixes} == set(kept)


async def test_prefixes_that_are_shorter_than_a_page_have_no_context_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_PREFIXES", 2)
    closed = list[str]()

    class RecordingEngine(ScriptedEngine):
        async def close(self, caller: Caller, context_id: str) -> None:
            closed.append(context_id)
            await super().close(caller, context_id)

    harness = ProgramsHarness(engine := RecordingEngine())
    session = harness.session()
    for used in "abcd":
        assert await ask(session, call(session, f"{used} {{{{o}}}}", o=output("o"))["o"])
        await run_event_loop()
    assert {text[0] for *_, text in harness.nodes[0].prefixes} == {"c", "d"}
    assert len(closed) == 4, "the context of each call"
    assert "" not in closed
    assert engine.contexts == {}


async def test_prefixes_that_are_shorter_than_a_page_do_not_take_the_places_of_other_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "MAX_PREFIXES", 4)
    monkeypatch.setattr(executor, "MAX_TENANT_PREFIXES", 2)
    harness = ProgramsHarness(engine := ScriptedEngine())
    for tenant, used in (("other", "x" * 80), *(("t", short) for short in "abcdef")):
        session = harness.session(tenant)
        assert await ask(session, call(session, f"{used} {{{{o}}}}", o=output("o"))["o"])
        await run_event_loop()
    assert [(tenant, chr(tokens[-1])) for (tenant, _), tokens in engine.contexts.items()] == [("other", "x")]
    assert [(tenant, text[0]) for tenant, _, text in harness.nodes[0].prefixes] == [
        ("other", "x"),
        ("t", "e"),
        ("t", "f"),
    ]


@pytest.mark.parametrize("reason", ["QUOTA", "TOO_MANY_CONTEXTS"])
async def test_kept_prefixes_make_room_for_calls(reason: str) -> None:
    """Of the same tenant, the longest unused first, and no more than are needed."""

    class LimitedEngine(ScriptedEngine):
        async def create(self, caller: Caller, request: CreateContextRequest) -> Any:
            if sum(tenant == caller.tenant for tenant, _ in self.contexts) >= 2:
                self.log.append(("refuse", ""))
                raise ResourceExhausted("no more contexts", reason=reason, retry_after_s=60.0)
            return await super().create(caller, request)

    harness = ProgramsHarness(engine := LimitedEngine())
    for tenant, used in (("other", "x"), ("t", "a"), ("t", "b"), ("t", "c")):
        session = harness.session(tenant)
        assert await ask(session, call(session, f"{used * 80} {{{{o}}}}", o=output("o"))["o"])
        await run_event_loop()
    kept = [(tenant, chr(tokens[-1])) for (tenant, _), tokens in engine.contexts.items()]
    assert sorted(kept) == [("other", "x"), ("t", "b"), ("t", "c")]
    assert len(engine.did("refuse")) == 1


async def test_without_kept_prefixes_a_call_waits_for_room() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failing, engine.failure = "create", ResourceExhausted("full", reason="QUOTA", retry_after_s=0.01)
    asking = asyncio.create_task(ask(session, call(session, "say {{o}}", o=output("o"))["o"]))
    await until(lambda: len(engine.did("create")) >= 2)
    engine.failure = None
    assert await asking == "<say >"


async def test_a_prefix_shorter_than_a_page_is_not_kept() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    for _ in range(2):
        assert await ask(session, call(session, "short: {{o}}", o=output("o"))["o"])
        await run_event_loop()
        assert engine.contexts == {}
    assert engine.did("update") == []


async def test_time_is_over_while_it_is_tried_again_and_again() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.01)
    request = SubmitCallRequest(template="say {{o}}", parameters=[output("o")], timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        await ask(session, session.submit(request).tasks[0].output.id)
    tries = len(engine.log)
    await asyncio.sleep(0.05)
    assert len(engine.log) == tries


async def test_one_tenants_queue_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_WAITING", 5)
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    greedy, other = harness.session("greedy"), harness.session("other")
    engine.gate.clear()
    ids = [call(greedy, f"{i} {{{{o}}}}", o=output("o"))["o"] for i in range(8)]
    for each in ids:
        greedy.request(each, Criterion.THROUGHPUT)
    asking = asyncio.create_task(ask(other, call(other, "say {{o}}", o=output("o"))["o"]))
    await run_event_loop()
    engine.gate.set()
    assert await asking == "<say >"
    results = await asyncio.gather(*(greedy.variable(each).wait() for each in ids), return_exceptions=True)
    assert {type(each) for each in results} == {str, ResourceExhausted}


async def test_who_was_away_is_not_behind_for_what_he_had() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    old, new = harness.session("old"), harness.session("new")
    for i in range(20):
        await ask(old, call(old, f"before {i} {{{{o}}}}", o=output("o"))["o"])
    engine.gate.clear()
    engine.log.clear()
    for i in range(10):
        new.request(call(new, f"n{i} {{{{o}}}}", o=output("o"))["o"], Criterion.THROUGHPUT)
    await run_event_loop()
    asking = asyncio.create_task(ask(old, call(old, "mine {{o}}", o=output("o"))["o"]))
    await run_event_loop()
    engine.gate.set()
    await asking
    assert [text[:2] for text in engine.did("generate")].index("mi") <= 2


async def test_other_doors_do_not_shut_programs_out() -> None:
    harness = ProgramsHarness(ScriptedEngine())
    harness.nodes[0].update_load(replace(STATS, running=9, waiting=0, pages_reserved=10**9))
    session = harness.session()
    assert await ask(session, call(session, "say {{o}}", o=output("o"))["o"]) == "<say >"


async def test_a_deletion_that_is_given_up_closes_all_the_same() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    sessions = [harness.session(tenant) for tenant in "ab"]
    engine.gate.clear()
    for session in sessions:
        session.request(call(session, "say {{o}}", o=output("o"))["o"], Criterion.THROUGHPUT)
    await until(lambda: len(engine.running) == 2)
    leaving, staying = (asyncio.create_task(harness.programs.delete(each.tenant, each.id)) for each in sessions)
    await asyncio.sleep(0)
    leaving.cancel()
    await staying
    await run_event_loop()
    assert engine.contexts == {}


async def test_an_engine_lost_behind_the_last_part_is_not_asked_again() -> None:
    one, two = ScriptedEngine("one", answer=lambda text: "abc"), ScriptedEngine("two", answer=lambda text: "XYZ")
    harness = ProgramsHarness(one, two)
    one.ticks_to_close = 50  # the last part was told, and the stream has not ended
    session = harness.session()
    variable = session.request(call(session, "say {{o}}", o=output("o"))["o"], Criterion.LATENCY)
    await until(lambda: variable.text == "abc")
    harness.registry.lose(harness.nodes[0])
    assert await variable.wait() == "abc"
    assert two.did("generate") == []


async def test_text_that_an_engine_held_back_is_not_lost() -> None:
    """Tokens came, and their text did not, as it could have become a stop string: the next engine has the tokens."""
    one, two = ScriptedEngine("one"), ScriptedEngine("two", answer=lambda text: {"say foo#": "#bar"}[text])
    generate = one.generate

    async def held_back(caller, request):
        async for piece in generate(caller, request):
            yield replace(piece, text="foo", token_ids=[ord(each) for each in "foo#"], finish=None)
            await asyncio.Event().wait()

    one.generate = held_back
    harness = ProgramsHarness(one, two)
    session = harness.session()
    variable = session.request(call(session, "say {{o}}", o=output("o"))["o"], Criterion.LATENCY)
    await until(lambda: variable.text == "foo")
    harness.registry.lose(harness.nodes[0])
    assert await variable.wait() == "foo#bar"
    assert [request.resume_tokens for request in two.requests] == [4]


async def test_reading_a_failure_often_keeps_nothing() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    variable = session.create_variable("x")
    variable.fail(Cancelled("gone"))
    for _ in range(20):
        with pytest.raises(Cancelled) as error:
            await variable.wait()
    depth, trace = 0, error.value.__traceback__
    while trace is not None:
        depth, trace = depth + 1, trace.tb_next
    assert depth < 10


async def test_an_odd_error_does_not_end_the_watch() -> None:
    harness = ProgramsHarness(heartbeat_s=0.01)
    engine = ScriptedEngine()
    watching = asyncio.create_task(harness.registry.watch("e", engine, encode))
    await until(lambda: bool(harness.registry.handles))
    engine.failure = RuntimeError("odd")
    await until(lambda: not harness.registry.handles)
    engine.failure = None
    await until(lambda: bool(harness.registry.handles))
    watching.cancel()


async def test_long_texts_are_looked_at_only_where_they_begin() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    x = session.create_variable("x", text="x" * (2 << 20))
    ids = call(session, "{{x}}{{x}}{{x}}{{o}}", x=(x.id,), o=output("o"))
    task = session.graph.producer(session.variable(ids["o"]))
    task.measure_prompt()
    assert (task.prompt_characters, len(task.prompt_blocks)) == (6 << 20, 1024)
    y = session.create_variable("y", text="y" * (2 << 20))
    ids = call(session, "{{x}}{{x}}{{y}}{{y}}{{x}}{{o}}", x=(x.id,), y=(y.id,), o=output("o"))
    with pytest.raises(ResourceExhausted):
        await ask(session, ids["o"])


async def test_losing_every_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ProgramsHarness(*[ScriptedEngine(f"e{i}") for i in range(3)])
    for engine in harness.engines:
        engine.failure, engine.failing = Unavailable("gone"), "generate"
    session = harness.session()
    with pytest.raises(Unavailable):
        await ask(session, call(session, "say {{o}}", o=output("o"))["o"])


def too_late(retry_after_s: float) -> ResourceExhausted:
    return ResourceExhausted("cannot end", reason="DEADLINE_UNREACHABLE", retry_after_s=retry_after_s)


async def test_a_task_that_cannot_be_in_time_fails_with_that_as_soon_as_waiting_is_in_vain() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure, engine.failing = too_late(700.0), "generate"
    with pytest.raises(ResourceExhausted) as error:
        await ask(session, call(session, "say {{o}}", o=output("o"))["o"])
    assert error.value.reason == "DEADLINE_UNREACHABLE"
    assert len(engine.did("generate")) <= 1


async def test_an_engine_that_refuses_for_no_time_at_all_is_not_asked_without_a_pause() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure = too_late(0.0)
    request = SubmitCallRequest(template="say {{o}}", parameters=[output("o")], timeout_s=0.5)
    with pytest.raises(ResourceExhausted) as error:
        await ask(session, session.submit(request).tasks[0].output.id)
    assert error.value.reason == "DEADLINE_UNREACHABLE"
    assert len(engine.did("create")) <= 4  # after 0.05, 0.1 and 0.2 s


async def test_a_task_that_was_too_late_for_an_engine_is_done_when_it_has_time() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure = too_late(0.01)
    asking = asyncio.create_task(ask(session, call(session, "say {{o}}", o=output("o"))["o"]))
    await until(lambda: len(engine.did("create")) > 1)
    engine.failure = None
    assert await asking == "<say >"
