"""Engines that are killed, silent or erring: every request ends once, and no token is lost or comes twice."""

import asyncio
import random
import time
from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    JaxctxError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from jaxctx.programs import executor
from jaxctx.types import CreateContextRequest, Criterion, SubmitCallRequest
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop, until
from tests.jaxctx.programs.scripted import ScriptedEngine, encode

STORY = "Once a page was"


def story(text: str) -> str:
    """What is left of it after this text."""
    return STORY[len(text.partition(": ")[2]) :]


def gone() -> Unavailable:
    return Unavailable("connection refused")


async def test_an_engine_that_is_lost_in_the_middle_of_an_output() -> None:
    one, two = ScriptedEngine("one", answer=story), ScriptedEngine("two", answer=story)
    harness = ProgramsHarness(one, two)
    session = harness.session()
    one.parts_before_failure, one.failure = 2, None
    o = call(session, "Tell: {{o}}", o=output("o"))["o"]
    one.gate.clear()
    reading = session.request(o, Criterion.LATENCY)
    await until(lambda: bool(one.running))
    one.failure = gone()
    one.gate.set()
    parts = [part async for part in reading.read()]
    assert "".join(parts) == STORY
    assert one.did("generate") == ["Tell: "]
    assert two.did("generate") == ["Tell: On"]
    assert list(harness.registry.handles) == ["two"]
    await run_event_loop()
    assert two.contexts == {}


@pytest.mark.parametrize("failing", ["rewind", "update"])
async def test_a_context_that_cannot_become_a_prefix_s_is_closed(failing: str) -> None:
    """It would have lived as long as a call may take, and a prefix been remembered that is none."""
    engine = ScriptedEngine()
    harness = ProgramsHarness(engine)
    session = harness.session()
    prefix = "You never guess. " * 8
    engine.failing, engine.failure = failing, Internal("a defect")
    await ask(session, call(session, prefix + "{{o}}", o=output("o"))["o"])
    await harness.programs.executor.wait_until_released("t")
    assert engine.contexts == {}
    assert harness.nodes[0].prefixes == {}
    engine.failure = None
    await ask(session, call(session, prefix + "{{o}}", o=output("o"))["o"])
    await harness.programs.executor.wait_until_released("t")
    assert len(engine.contexts) == 1


async def test_no_prefix_is_kept_if_so_set() -> None:
    engine = ScriptedEngine()
    harness = ProgramsHarness(engine, prefix_timeout_s=0.0)
    session = harness.session()
    await ask(session, call(session, "You never guess. " * 8 + "{{o}}", o=output("o"))["o"])
    await harness.programs.executor.wait_until_released("t")
    assert engine.contexts == {}


async def test_a_context_whose_making_was_cut_short_is_closed() -> None:
    """The engine made it, and whoever asked was cancelled before the answer came."""
    engine, made, hold = ScriptedEngine(), asyncio.Event(), asyncio.Event()
    create = engine.create

    async def slow(caller: Caller, request: CreateContextRequest) -> Any:
        answer = await create(caller, request)
        made.set()
        await hold.wait()
        return answer

    engine.create = slow  # type: ignore[method-assign]
    harness = ProgramsHarness(engine)
    session = harness.session()
    asking = asyncio.create_task(ask(session, call(session, "Tell: {{o}}", o=output("o"))["o"]))
    await made.wait()
    assert len(engine.contexts) == 1
    await harness.programs.delete("t", session.id)
    with pytest.raises(Cancelled):
        await asking
    await run_event_loop()
    await harness.programs.executor.wait_until_released("t")
    assert engine.contexts == {}


async def test_earlier_outputs_of_the_call_are_kept() -> None:
    one, two = ScriptedEngine("one", answer=lambda text: "A"), ScriptedEngine("two", answer=lambda text: "B")
    harness = ProgramsHarness(one, two)
    session = harness.session()
    x = session.create_variable("x")
    outputs = call(session, "1 {{a}} 2 {{x}} {{b}}", a=output("a"), x=(x.id,), b=output("b"))
    asking = asyncio.create_task(ask(session, outputs["b"]))
    await session.variable(outputs["a"]).wait()
    harness.registry.lose(harness.nodes[0])
    session.set_variable(x.id, "X")
    assert await asking == "B"
    assert two.did("generate") == ["1 A 2 X "]


async def test_a_silent_engine_is_lost_after_three_beats_and_taken_back() -> None:
    one, two = ScriptedEngine("one"), ScriptedEngine("two")
    harness = ProgramsHarness(heartbeat_s=0.01)
    watching = asyncio.create_task(
        harness.programs.watch(harness.registry.watch("one", one, encode), harness.registry.watch("two", two, encode))
    )
    await until(lambda: len(harness.registry.handles) == 2)
    before = harness.registry.handles["one"]
    session = harness.session()
    one.silent = True
    o = call(session, "say {{o}}", o=output("o"))["o"]
    assert await ask(session, o) == "<say >"
    assert one.did("create")
    assert two.did("generate")
    await until(lambda: "one" not in harness.registry.handles)
    one.silent = False
    await until(lambda: "one" in harness.registry.handles)
    assert harness.registry.handles["one"].epoch > before.epoch
    watching.cancel()


async def test_contexts_of_an_engine_that_was_silent_are_closed_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the same process, with all that it had. Nobody waits for that."""
    monkeypatch.setattr(executor, "CLOSE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(executor, "CLOSE_AGAIN_S", (0.02,) * 500)
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.gate.clear()
    session.request(call(session, "say {{o}}", o=output("o"))["o"], Criterion.LATENCY)
    await until(lambda: bool(engine.running))
    assert engine.contexts
    engine.silent = True
    await asyncio.wait_for(harness.programs.delete("t", session.id), 5)
    assert engine.contexts, "the engine did not hear of it"
    engine.silent = False
    await until(lambda: not engine.contexts)
    closings = len(engine.did("close"))
    await asyncio.sleep(0.1)
    assert len(engine.did("close")) == closings


async def test_many_contexts_of_a_silent_engine_are_closed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are given up while others are tried again."""
    monkeypatch.setattr(executor, "CLOSE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(executor, "CLOSE_AGAIN_S", (0.05,) * 200)
    harness = ProgramsHarness(engine := ScriptedEngine())
    sessions = [harness.session(), harness.session()]
    engine.gate.clear()
    for session in sessions:
        for _ in range(2):
            session.request(call(session, "say {{o}}", o=output("o"))["o"], Criterion.LATENCY)
    await until(lambda: len(engine.running) == 4)
    engine.silent = True
    await asyncio.wait_for(harness.programs.delete("t", sessions[0].id), 5)
    assert len(harness.programs.executor._closing_again) == 1
    await asyncio.wait_for(harness.programs.delete("t", sessions[1].id), 5)
    assert len(harness.programs.executor._closing_again) == 1

    closing, most, close = 0, 0, engine.close

    async def counted(caller: Caller, context_id: str) -> None:
        nonlocal closing, most
        closing += 1
        most = max(most, closing)
        try:
            await close(caller, context_id)
        finally:
            closing -= 1

    monkeypatch.setattr(engine, "close", counted)
    await until(lambda: most > 0)
    engine.silent = False
    await until(lambda: not engine.contexts and not harness.programs.executor._closing_again)
    assert most == 1
    assert not harness.programs.executor._unclosed


async def test_contexts_are_closed_behind_one_that_cannot_be_and_those_that_come_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(executor, "CLOSE_AGAIN_S", (0.02,) * 4)
    runs, tried = executor.Executor(time.monotonic), list[str]()

    class Engine:
        answers = False

        async def close(self, caller: Caller, context_id: str) -> None:
            tried.append(context_id)
            if context_id == "bad" or not self.answers:
                raise Unavailable("not now")

    engine: Any = Engine()
    for context_id in ("bad", "good"):
        runs._close_later_again(engine, Caller("t"), context_id)
    await until(lambda: len(tried) >= 3)
    runs._close_later_again(engine, Caller("t"), "late")  # for which little of the first ones' time is left
    await until(lambda: len(tried) >= 6)
    engine.answers = True
    await until(lambda: not runs._unclosed)
    assert tried.count("late") >= 1
    assert tried.count("good") >= 1
    assert {"late", "good"} <= {*tried[6:]}
    assert tried[-4:] == ["bad"] * 4  # nothing else is left


async def test_an_engine_that_is_gone_for_good_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CLOSE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(executor, "CLOSE_AGAIN_S", (0.01, 0.01))
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.gate.clear()
    session.request(call(session, "say {{o}}", o=output("o"))["o"], Criterion.LATENCY)
    await until(lambda: bool(engine.running))
    engine.silent = True
    await harness.programs.delete("t", session.id)
    await until(lambda: not harness.programs.executor._closing_again)
    assert engine.contexts
    assert not harness.programs.executor._unclosed


@pytest.mark.parametrize("error", [InvalidArgument("a bad id"), PermissionDenied("not with this key")], ids=str)
async def test_a_context_that_an_engine_refuses_to_close_is_not_closed_again(error: JaxctxError) -> None:
    """It would refuse that again, and contexts that it may close wait behind."""
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failing, engine.failure = "close", error
    assert await ask(session, call(session, "say {{o}}", o=output("o"))["o"])
    await harness.programs.delete("t", session.id)
    assert len(engine.did("close")) == 1
    assert not harness.programs.executor._unclosed


async def test_a_context_that_is_gone_is_closed() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.gate.clear()
    session.request(call(session, "say {{o}}", o=output("o"))["o"], Criterion.LATENCY)
    await until(lambda: bool(engine.running))
    engine.contexts.clear()
    await harness.programs.delete("t", session.id)
    assert not harness.programs.executor._closing_again


async def test_an_erring_engine_gives_a_typed_error() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure = ValueError("secret detail")
    with pytest.raises(Internal) as error:
        await ask(session, call(session, "say {{o}}", o=output("o"))["o"])
    assert "secret" not in error.value.message


async def test_a_prefix_that_cannot_be_filled_leaves_nothing() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure, engine.failing = ResourceExhausted("no pages", reason="NEVER_FITS"), "fill"
    template = "a prefix that is long enough for a page of its own, and then some more: {{o}}"
    with pytest.raises(ResourceExhausted):
        await ask(session, call(session, template, o=output("o"))["o"])
    await run_event_loop()
    assert engine.contexts == {}
    engine.failure = None
    assert await ask(session, call(session, template, o=output("o"))["o"])


async def test_a_patient_registry_waits_for_a_slow_engine() -> None:
    harness = ProgramsHarness(heartbeat_s=0.01)
    engine = ScriptedEngine()
    watching = asyncio.create_task(harness.registry.watch("e", engine, encode, patient=True))
    await until(lambda: bool(harness.registry.handles))
    engine.silent = True
    await asyncio.sleep(0.1)
    assert list(harness.registry.handles) == ["e"]
    watching.cancel()


async def test_work_without_an_engine_waits_until_its_deadline() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    harness.registry.lose(harness.nodes[0])
    request = SubmitCallRequest(template="say {{o}}", parameters=[output("o")], timeout_s=0.05)
    with pytest.raises(DeadlineExceeded):
        await ask(session, session.submit(request).tasks[0].output.id)
    waiting = call(session, "say {{o}}", o=output("o"))["o"]
    asking = asyncio.create_task(ask(session, waiting))
    await run_event_loop()
    harness.registry.register("again", engine, encode)
    assert await asking == "<say >"


@pytest.mark.parametrize(("losses", "failing"), [(3, "generate"), (12, "create")])
async def test_a_task_that_loses_every_engine_ends(losses: int, failing: str) -> None:
    """Later if it was not begun: yet an engine may die of a prompt's tokens too."""
    engines = [ScriptedEngine(f"e{i}") for i in range(losses + 2)]
    harness = ProgramsHarness(*engines)
    for engine in engines:
        engine.failure, engine.failing = gone(), failing
    session = harness.session()
    with pytest.raises(Unavailable) as error:
        await ask(session, call(session, "say {{o}}", o=output("o"))["o"])
    assert error.value.reason == "ENGINE_FAILED"
    assert len(harness.registry.handles) == 2  # it did not take all of them with it


@pytest.mark.parametrize("failing", ["create", "fill"])
async def test_a_task_is_not_to_blame_for_engines_that_did_not_begin_it(failing: str) -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(5)]
    harness = ProgramsHarness(*engines)
    for engine in engines:
        engine.failure, engine.failing = gone(), failing
    session = harness.session()
    asking = asyncio.create_task(ask(session, call(session, "say {{o}}", o=output("o"))["o"]))
    await until(lambda: not harness.registry.handles)
    harness.registry.register("new", ScriptedEngine("new"), encode)
    assert await asking == "<say >"


async def test_a_task_of_which_something_came_goes_on_however_many_engines_are_lost() -> None:
    """Each gives the next letter: five losses, and not one in turn of nothing."""
    engines = [ScriptedEngine(f"e{i}", answer=story) for i in range(6)]
    harness = ProgramsHarness(*engines)
    for engine in engines[:5]:
        engine.parts_before_failure, engine.failure, engine.failing = 1, gone(), "nothing else"
    session = harness.session()
    assert await ask(session, call(session, "Tell: {{o}}", o=output("o"))["o"]) == STORY
    begun = [text for engine in engines for text in engine.did("generate")]
    assert begun == [f"Tell: {STORY[:letters]}" for letters in range(6)]
    assert list(harness.registry.handles) == ["e5"]


async def test_an_answer_of_a_former_life_is_not_taken() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(answer=story))
    session = harness.session()
    engine.gate.clear()
    o = call(session, "Tell: {{o}}", o=output("o"))["o"]
    asking = asyncio.create_task(ask(session, o))
    await until(lambda: bool(engine.running))
    harness.registry.register("e", engine, encode)
    await until(lambda: len(engine.did("generate")) == 2)
    engine.gate.set()
    assert await asking == STORY


async def test_a_thousand_losses_of_one_of_two_engines() -> None:
    """Under load, at any moment of any call; each request ends once with the whole story."""
    random.seed(7)
    engines = {name: ScriptedEngine(name, answer=story) for name in ("one", "two")}
    harness = ProgramsHarness(*engines.values())
    session = harness.session()
    engines["two"].ticks_to_close = 30  # what is lost there ends when its calls are at work elsewhere already
    losses = 0

    async def work(index: int) -> str:
        o = call(session, f"Tell {index}: {{{{o}}}}", o=output("o"))["o"]
        return await session.request(o, Criterion.THROUGHPUT).wait()

    asking = [asyncio.create_task(work(index)) for index in range(6)]
    ended = []
    while losses < 1000:
        for _ in range(random.randrange(1, 14)):
            await asyncio.sleep(0)
        name = random.choice(("one", "two"))
        if (node := harness.registry.handles.get(name)) is not None:
            harness.registry.lose(node)
            losses += 1
        for each, engine in engines.items():
            if each not in harness.registry.handles:
                harness.registry.register(each, engine, encode)
        for task in [each for each in asking if each.done()]:
            asking.remove(task)
            ended.append(task)
            asking.append(asyncio.create_task(work(6 + len(ended))))
    ended += asking
    results = await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), 120)
    told = {str(each) if isinstance(each, str) else type(each) for each in results}
    assert told <= {STORY, Unavailable}
    assert sum(result == STORY for result in results) > 100
    await until(lambda: all(engine.running == {} and engine.contexts == {} for engine in engines.values()))


async def test_a_draining_engine_ends_what_it_has_and_begins_nothing() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.gate.clear()
    one = asyncio.create_task(ask(session, call(session, "one {{o}}", o=output("o"))["o"]))
    await until(lambda: bool(engine.running))
    engine.failure = Unavailable("drains", reason="DRAINING")
    two = asyncio.create_task(ask(session, call(session, "two {{o}}", o=output("o"))["o"]))
    await until(lambda: harness.nodes[0].draining)
    engine.gate.set()
    assert await one == "<one >"
    engine.failure = None
    await run_event_loop()
    assert not two.done()
    harness.registry.register("other", engine, encode)
    assert await two == "<two >"


async def test_when_the_server_stops_everybody_is_told() -> None:
    harness = ProgramsHarness(ScriptedEngine())
    watching = asyncio.create_task(harness.programs.watch())
    session = harness.session()
    waiting = asyncio.create_task(session.create_variable("x").wait())
    await run_event_loop()
    watching.cancel()
    with pytest.raises(Unavailable):
        await waiting
