"""Native steps: what each does, bad arguments, the limits of size and time, a server's own, and steps in programs."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxctx.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jaxctx.programs import native_functions, sessions
from jaxctx.types import Criterion, Parameter, SamplingParams, SubmitCallRequest, TaskPhase
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop, step, until
from tests.jaxctx.programs.scripted import ScriptedEngine


async def run(function: str | native_functions.Function, **texts: str) -> str:
    """What a step of it makes."""
    functions = native_functions.BUILT_IN_FUNCTIONS if isinstance(function, str) else {"own": function}
    session = ProgramsHarness(ScriptedEngine(), functions=functions).session()
    return await ask(session, step(session, function if isinstance(function, str) else "own", **texts))


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("strip", {"text": " x\n"}, "x"),
        ("strip", {"text": "--x-", "characters": "-"}, "x"),
        ("strip", {"text": "-x- x--", "characters": "x-"}, " "),
        ("strip", {"text": "--", "characters": "-"}, ""),
        ("strip", {"text": " x ", "characters": ""}, " x "),
        ("join", {"a": "a", "b": "b", "separator": ", ", "c": "c"}, "a, b, c"),
        ("join", {}, ""),
        ("split", {"text": "a\nb\nc"}, "a"),
        ("split", {"text": "a\nb\nc", "part": "1"}, "b"),
        ("split", {"text": "a;b", "separator": ";", "part": "-1"}, "b"),
        ("extract", {"text": "score: 7/10", "pattern": r"\d+"}, "7"),
        ("extract", {"text": "n = 12, m = 3", "pattern": r"n = (\d+), m = (\d+)", "group": "2"}, "3"),
        ("extract", {"text": "b", "pattern": "(a)?b", "group": "1"}, ""),
        ("json_pointer", {"text": '{"a": [{"b/c": "text"}]}', "pointer": "/a/0/b~1c"}, "text"),
        ("json_pointer", {"text": '{"": {"~": "é"}}', "pointer": "/"}, '{"~": "é"}'),
        ("json_pointer", {"text": "[1, 2]"}, "[1, 2]"),
        ("template", {"template": "{{a}} and {{ b }} not {{c}}", "a": "x", "b": "{{a}}"}, "x and {{a}} not {{c}}"),
    ],
)
async def test_steps(name: str, texts: dict[str, str], expected: str) -> None:
    assert await run(name, **texts) == expected


@pytest.mark.parametrize(
    ("name", "texts", "error"),
    [
        ("split", {"text": "a", "part": "1"}, FailedPrecondition),
        ("split", {"text": "a", "part": "one"}, FailedPrecondition),
        ("split", {"text": "a", "separator": ""}, FailedPrecondition),
        ("extract", {"text": "a", "pattern": "("}, FailedPrecondition),
        ("extract", {"text": "a", "pattern": "x{1000}" * 100}, FailedPrecondition),
        ("extract", {"text": "a", "pattern": "b"}, FailedPrecondition),
        ("extract", {"text": "a", "pattern": "a", "group": "1"}, FailedPrecondition),
        ("extract", {"text": "a", "pattern": "x" * (native_functions.MAX_PATTERN + 1)}, FailedPrecondition),
        ("extract", {"text": "a" * (native_functions.MAX_SEARCHED + 1), "pattern": "a"}, FailedPrecondition),
        ("json_pointer", {"text": "{", "pointer": "/a"}, FailedPrecondition),
        ("json_pointer", {"text": "[]", "pointer": "/0"}, FailedPrecondition),
        ("json_pointer", {"text": "[1]", "pointer": "/-1"}, FailedPrecondition),
        ("json_pointer", {"text": '{"a": 1}', "pointer": "x/a"}, FailedPrecondition),
        ("json_pointer", {"text": '"text"', "pointer": "/0"}, FailedPrecondition),
        ("json_pointer", {"text": "[" * 100_000}, FailedPrecondition),
        ("json_pointer", {"text": r'"\ud800"'}, FailedPrecondition),
        ("strip", {"text": "x" * (native_functions.MAX_BYTES + 1)}, ResourceExhausted),
        ("strip", {"text": "é" * (native_functions.MAX_BYTES // 2) + "e"}, ResourceExhausted),
    ],
)
async def test_refusals(name: str, texts: dict[str, str], error: type) -> None:
    with pytest.raises(error):
        await run(name, **texts)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("template", {"template": "{{a}}" * 200_000, "a": "y" * 1_000_000}),
        ("join", {"separator": "y" * 1_000_000, **{f"a{i}": "" for i in range(256)}}),
    ],
)
async def test_an_output_that_would_be_too_long_is_never_made(name: str, texts: dict[str, str]) -> None:
    """One would have a terabyte."""
    with pytest.raises(ResourceExhausted) as error:
        await run(name, **texts)
    assert "output" in error.value.message
    assert error.value.reason == "NEVER_FITS"


async def test_many_characters_to_strip_from_a_long_text_take_little_time() -> None:
    """By `str.strip` it takes minutes, in which nothing else runs."""
    half = native_functions.MAX_BYTES // 2
    characters = "b" * (native_functions.MAX_BYTES - 1) + "a"
    began = time.monotonic()
    assert await run("strip", text="a" * half + "c" + "a" * (half - 1), characters=characters) == "c"
    assert time.monotonic() - began < native_functions.TIMEOUT_S


async def test_a_pattern_that_would_take_for_ever_elsewhere() -> None:
    with pytest.raises(FailedPrecondition, match="no match"):  # not DeadlineExceeded
        await run("extract", text="a" * native_functions.MAX_SEARCHED, pattern="(a+)+b")


async def test_classes_of_unicode_do_not_hold_the_interpreter() -> None:
    with pytest.raises(FailedPrecondition, match="too large"):  # as it is given up early
        await run("extract", text="", pattern=r"\pL" * (native_functions.MAX_PATTERN // 3))


@pytest.mark.parametrize(
    ("function", "values", "field", "words"),
    [
        ("rm", {}, "function", "must be one of extract, join, json_pointer, split, strip, template"),
        (
            "strip",
            {},
            "parameters",
            "must be one output and those of strip(text: str, characters: str | None = None) -> str",
        ),
        ("strip", {"text": "a", "shout": "b"}, "parameters", "strip(text: str"),
        ("strip", {"text": "a", "p": output("p")}, "parameters", "one output"),
    ],
)
async def test_what_is_refused_at_once(function: str, values: dict[str, str], field: str, words: str) -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(InvalidArgument) as error:
        step(session, function, **values)
    (violation,) = error.value.violations
    assert violation.field == field
    assert words in violation.description
    assert not session.variables
    assert not session.calls


async def test_a_name_twice_no_output_a_variable_that_is_not_there_or_a_server_that_drains() -> None:
    harness = ProgramsHarness(ScriptedEngine())
    session = harness.session()
    text = Parameter(name="text", text="a")
    for parameters, field in (([text, text, output("o")], "parameters[1].name"), ([text], "parameters")):
        with pytest.raises(InvalidArgument) as error:
            session.submit(SubmitCallRequest(function="strip", parameters=parameters))
        assert [each.field for each in error.value.violations] == [field]
    with pytest.raises(NotFound):
        step(session, "strip", text=("none",))
    harness.programs.draining = True
    with pytest.raises(Unavailable):
        step(session, "strip", text="a")


@pytest.mark.parametrize(
    "settings",
    [{"max_tokens": 1}, {"stop": ("a",)}, {"ignore_eos": True}, {"sampling": SamplingParams(temperature=0.5)}],
)
async def test_no_model_says_the_output_of_a_step(settings: dict[str, Any]) -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    parameters = [Parameter(name="text", text="a"), output("o", **settings)]
    with pytest.raises(InvalidArgument) as error:
        session.submit(SubmitCallRequest(function="strip", parameters=parameters))
    assert [each.field for each in error.value.violations] == ["parameters[1].output"]


class TestOwn:
    """Functions that a server adds by entry points."""

    @staticmethod
    def functions(
        monkeypatch: pytest.MonkeyPatch, *functions: Callable[..., Any]
    ) -> dict[str, native_functions.Function]:
        points = [SimpleNamespace(name=each.__name__, load=lambda each=each: each) for each in functions]
        monkeypatch.setattr(native_functions, "entry_points", lambda group: points if group == "jaxctx.native" else [])
        return native_functions.load_functions()

    async def test_one_that_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def shout(text: str, times: str = "1") -> list[str]:
            return [text.upper()] * int(times)

        harness = ProgramsHarness(ScriptedEngine(), functions=self.functions(monkeypatch, shout))
        session = harness.session()
        assert await ask(session, step(session, "shout", text="quiet", times="2")) == "QUIETQUIET"
        assert await ask(session, step(session, "strip", text=" x ")) == "x"
        with pytest.raises(InvalidArgument, match="shout, split"):
            step(session, "whisper")

    async def test_those_that_cannot_be_loaded_are_left_out_and_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def lacking() -> None:
            raise ImportError("no such module")

        points = [
            SimpleNamespace(name="lacking", load=lacking),
            SimpleNamespace(name="number", load=lambda: 7),
            SimpleNamespace(name="whole", load=lambda: str.upper),
        ]
        monkeypatch.setattr(native_functions, "entry_points", lambda group: points)
        assert sorted(native_functions.load_functions()) == sorted({*native_functions.BUILT_IN_FUNCTIONS, "whole"})
        assert [word in caplog.text for word in ("lacking", "no such module", "number")] == [True] * 3

    async def test_none_takes_the_place_of_a_built_in_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def strip(text: str) -> str:
            return "mine"

        assert self.functions(monkeypatch, strip)["strip"] is native_functions.strip

    @pytest.mark.parametrize("raised", [ValueError("secret"), SystemExit(3), StopIteration("secret"), MemoryError()])
    async def test_one_that_raises(self, raised: BaseException) -> None:
        def broken(text: str) -> str:
            raise raised

        harness = ProgramsHarness(ScriptedEngine(), functions={"broken": broken})
        session = harness.session()
        with pytest.raises(FailedPrecondition) as error:
            await ask(session, step(session, "broken", text="x"))
        assert error.value.message == f"the function failed with {type(raised).__name__}"

    @pytest.mark.parametrize("made", [None, 7, ["a", 7], b"bytes"])
    async def test_one_that_gives_no_text(self, made: Any) -> None:
        with pytest.raises(FailedPrecondition):
            await run(lambda: made)

    async def test_one_that_takes_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_functions, "TIMEOUT_S", 0.05)
        release = threading.Event()

        def slow(text: str) -> str:
            release.wait(10)
            return text

        harness = ProgramsHarness(ScriptedEngine(), functions={"slow": slow, **native_functions.BUILT_IN_FUNCTIONS})
        session = harness.session()
        with pytest.raises(DeadlineExceeded):
            await ask(session, step(session, "slow", text="late"))
        monkeypatch.setattr(native_functions, "TIMEOUT_S", 5.0)  # one thread is still at work
        assert await ask(session, step(session, "strip", text=" quick ")) == "quick"
        release.set()

    async def test_slow_steps_of_a_tenant_fail_no_steps_of_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their threads are busy when their time is over; what others ask for must not wait for these."""
        monkeypatch.setattr(native_functions, "TIMEOUT_S", 0.2)
        release = threading.Event()

        def slow(text: str) -> str:
            release.wait(10)
            return text

        harness = ProgramsHarness(ScriptedEngine(), functions={"slow": slow, **native_functions.BUILT_IN_FUNCTIONS})
        greedy, other = harness.session("greedy"), harness.session("other")
        for i in range(8 * native_functions.THREADS):
            greedy.request(step(greedy, "slow", text=str(i)), Criterion.LATENCY)

        def count_failed() -> int:
            return sum(variable.error is not None for variable in greedy.variables.values())

        await until(lambda: count_failed() == native_functions.THREADS - 1)
        monkeypatch.setattr(native_functions, "TIMEOUT_S", 5.0)
        for i in range(2 * native_functions.THREADS):
            assert await ask(other, step(other, "strip", text=f" {i} ")) == str(i)
        assert count_failed() == native_functions.THREADS - 1  # the others never began
        release.set()

    async def test_conversations_do_not_count_as_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_functions, "TIMEOUT_S", 1.5)

        def slow(text: str) -> str:
            time.sleep(0.25)
            return text

        harness = ProgramsHarness(ScriptedEngine(), functions={"slow": slow})
        session = harness.session()
        asked = [ask(session, step(session, "slow", text=str(i))) for i in range(8 * native_functions.THREADS)]
        assert await asyncio.gather(*asked) == [str(i) for i in range(8 * native_functions.THREADS)]


async def test_outputs_count_as_texts_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a few bytes of requests could fill the memory of a server with copies of one text."""
    monkeypatch.setattr(sessions, "MAX_TEXT_BYTES", 1000)
    session = ProgramsHarness(ScriptedEngine()).session()
    x = session.create_variable("x", text="x" * 300).id
    copies = [step(session, "strip", text=(x,)) for _ in range(3)]
    assert [await ask(session, each) for each in copies[:2]] == ["x" * 300] * 2
    with pytest.raises(ResourceExhausted) as error:
        await ask(session, copies[2])
    assert error.value.reason == "QUOTA"
    assert session.variable(copies[2]).text == ""


async def test_steps_between_calls() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(answer=lambda text: " yes; no "))
    session = harness.session()
    o = call(session, "say {{o}}", o=output("o"))["o"]
    stripped = step(session, "strip", text=(o,))
    first, second = (step(session, "split", text=(stripped,), separator="; ", part=part) for part in "01")
    last = call(session, "not {{x}} but {{y}}: {{o}}", x=(second,), y=(first,), o=output("o"))["o"]
    await run_event_loop()
    assert engine.log == []
    await ask(session, last, Criterion.THROUGHPUT)
    assert engine.did("generate") == ["say ", "not no but yes: "]
    tasks = [each.info for each in session.tasks()]
    assert [each.function for each in tasks] == ["", "strip", "split", "split", ""]
    assert {each.phase for each in tasks} == {TaskPhase.DONE}
    assert tasks[1].inputs == [tasks[0].output]


async def test_a_step_runs_only_if_it_is_asked_for_and_once() -> None:
    ran = []
    harness = ProgramsHarness(ScriptedEngine(), functions={"note": lambda text: ran.append(text) or text})
    session = harness.session()
    x = session.create_variable("x").id
    wanted, unwanted = step(session, "note", text=(x,)), step(session, "note", text="unwanted")
    asking = [asyncio.create_task(ask(session, wanted)) for _ in range(2)]
    await run_event_loop()
    assert ran == []
    session.set_variable(x, "wanted")
    assert await asyncio.gather(*asking) == ["wanted"] * 2
    assert ran == ["wanted"]
    assert session.variable(unwanted).requested is None


async def test_a_number_may_come_from_a_variable() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    good, bad = (session.create_variable("n", text=text).id for text in ("1", "one"))
    assert await ask(session, step(session, "split", text="a\nb", part=(good,))) == "b"
    with pytest.raises(FailedPrecondition, match=r"ValueError: .*'one'"):
        await ask(session, step(session, "split", text="a\nb", part=(bad,)))


async def test_a_step_may_be_asked_for_with_its_submission() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    parameters = [output("o", criterion=Criterion.LATENCY), Parameter(name="text", text=" x ")]
    request = SubmitCallRequest(function="strip", parameters=parameters)
    assert await session.submit(request).tasks[0].output.wait() == "x"


async def test_what_failed_before_a_step_fails_it_and_what_fails_in_it_fails_the_rest() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    o = call(session, "say {{o}}", o=output("o"))["o"]
    engine.failure = ResourceExhausted("never", reason="NEVER_FITS")
    with pytest.raises(ResourceExhausted):
        await ask(session, step(session, "strip", text=(o,)))
    with pytest.raises(ResourceExhausted):  # it had failed already
        await ask(session, step(session, "strip", text=(o,)))
    broken = step(session, "json_pointer", text="{")
    with pytest.raises(FailedPrecondition):
        await ask(session, call(session, "of {{x}}: {{o}}", x=(broken,), o=output("o"))["o"])


async def test_an_input_that_never_comes() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(DeadlineExceeded):
        await ask(session, step(session, "strip", text=(session.create_variable("x").id,), timeout_s=0.05))


async def test_a_step_that_is_cancelled() -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(text: str) -> str:
        entered.set()
        release.wait(10)
        return text

    harness = ProgramsHarness(ScriptedEngine(), functions={"slow": slow})
    session = harness.session()
    running, waiting = step(session, "slow", text="x"), step(session, "slow", text=(session.create_variable("y").id,))
    for each in (running, waiting):
        session.request(each, Criterion.LATENCY)
    await until(entered.is_set)
    assert session.info.started == 1
    for call_id in list(session.calls):
        session.cancel(call_id)
    release.set()
    for each in (running, waiting):
        with pytest.raises(Cancelled):
            await ask(session, each)
    await run_event_loop()
    assert [each.phase for each in session.tasks()] == [TaskPhase.FAILED] * 2
    assert session.variable(running).text == ""


async def test_a_session_that_ends_under_a_step() -> None:
    harness = ProgramsHarness(ScriptedEngine())
    session = harness.session()
    made = session.request(step(session, "strip", text="x"), Criterion.LATENCY)
    await harness.programs.delete("t", session.id)
    with pytest.raises(Cancelled):
        await made.wait()


async def test_a_long_chain_of_steps() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    last = session.create_variable("x", text=" x ").id
    for _ in range(2000):
        last = step(session, "strip", text=(last,))
    assert await ask(session, last) == "x"


async def test_a_drain_waits_for_steps() -> None:
    harness = ProgramsHarness(ScriptedEngine(), functions={"slow": lambda text: time.sleep(0.1) or text})
    session = harness.session()
    made = session.request(step(session, "slow", text="x"), Criterion.LATENCY)
    await harness.programs.drain()
    assert made.text == "x"


async def test_what_went_wrong_is_told_in_a_few_words() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    secrets = '{"a": "' + "secret" * 1000 + '"}'
    failing = {
        "no match": step(session, "extract", text="a", pattern="b"),
        "line 1 column 2": step(session, "json_pointer", text="{"),
        "missing": step(session, "extract", text="a", pattern="("),
        "'b' not found": step(session, "json_pointer", text=secrets, pointer="/b"),
    }
    for words, output_id in failing.items():
        with pytest.raises(FailedPrecondition) as error:
            await ask(session, output_id)
        assert words in error.value.message
        assert len(error.value.message) < 300


async def test_what_failed_keeps_nothing_of_what_it_was_at() -> None:
    """A text of 2 MiB may be a hundred as JSON; a session has thousands of variables."""
    session = ProgramsHarness(ScriptedEngine()).session()
    failed = session.variable(step(session, "json_pointer", text="[[]]", pointer="/1"))
    with pytest.raises(FailedPrecondition):
        await ask(session, failed.id)
    assert failed.error is not None
    assert failed.error.__context__ is None
    assert failed.error.__cause__ is None
