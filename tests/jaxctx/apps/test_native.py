"""Native steps: what each does, bad input, and the limits of size and time."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from jaxctx.answers import Criterion
from jaxctx.apps import native
from jaxctx.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, ResourceExhausted
from jaxctx.v1.requests import SubmitStepRequest
from tests.jaxctx.apps.conftest import Company, ask, call, output
from tests.jaxctx.apps.scripted import ScriptedEngine


async def run(name: str, *texts: str, outputs: int = 1, **settings: str) -> Sequence[str]:
    inputs = {chr(ord("a") + n): text for n, text in enumerate(texts)}
    return await native.run(native.BUILT_IN[name], inputs, settings, outputs)


@pytest.mark.parametrize(
    ("name", "texts", "settings", "outputs", "expected"),
    [
        ("strip", [" x\n"], {}, 1, ["x"]),
        ("strip", ["--x-"], {"characters": "-"}, 1, ["x"]),
        ("join", ["a", "b", "c"], {"separator": ", "}, 1, ["a, b, c"]),
        ("join", [], {}, 1, [""]),
        ("split", ["a\nb\nc"], {}, 2, ["a", "b\nc"]),
        ("split", ["a;b"], {"separator": ";"}, 2, ["a", "b"]),
        ("replace", ["aXbX"], {"old": "X", "new": "é"}, 1, ["aébé"]),
        ("extract", ["n = 12, m = 3"], {"pattern": r"n = (\d+), m = (\d+)"}, 2, ["12", "3"]),
        ("extract", ["score: 7/10"], {"pattern": r"\d+"}, 1, ["7"]),
        ("json_pointer", ['{"a": [{"b/c": "text"}]}'], {"pointer": "/a/0/b~1c"}, 1, ["text"]),
        ("json_pointer", ["[1, 2]"], {}, 1, ["[1, 2]"]),
        ("template", ["x", "y"], {"template": "{{a}} and {{ b }} not {{c}}"}, 1, ["x and y not {{c}}"]),
    ],
)
async def test_steps(name: str, texts: list[str], settings: dict[str, str], outputs: int, expected: list[str]) -> None:
    assert list(await run(name, *texts, outputs=outputs, **settings)) == expected


@pytest.mark.parametrize(
    ("name", "texts", "settings", "outputs", "error"),
    [
        ("strip", ["a", "b"], {}, 1, InvalidArgument),
        ("split", ["a"], {}, 2, FailedPrecondition),
        ("replace", ["a"], {}, 1, InvalidArgument),
        ("extract", ["a"], {"pattern": "("}, 1, InvalidArgument),
        ("extract", ["a"], {"pattern": "b"}, 1, FailedPrecondition),
        ("extract", ["ab"], {"pattern": "(a)(b)"}, 1, FailedPrecondition),
        ("json_pointer", ["{"], {"pointer": "/a"}, 1, FailedPrecondition),
        ("json_pointer", ["[]"], {"pointer": "/0"}, 1, FailedPrecondition),
        ("json_pointer", ["[" * 100_000], {}, 1, FailedPrecondition),
        ("strip", ["x" * (native.MAX_BYTES + 1)], {}, 1, ResourceExhausted),
        ("replace", ["x" * 2000], {"old": "x", "new": "y" * 2000}, 1, ResourceExhausted),
    ],
)
async def test_refusals(name: str, texts: list[str], settings: dict[str, str], outputs: int, error: type) -> None:
    with pytest.raises(error):
        await run(name, *texts, outputs=outputs, **settings)


async def test_a_pattern_that_would_take_for_ever_elsewhere() -> None:
    started = time.monotonic()
    with pytest.raises(FailedPrecondition):
        await run("extract", "a" * 100_000, pattern="(a+)+b")
    assert time.monotonic() - started < native.TIMEOUT_S


async def test_time_and_errors_of_a_servers_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> list[str]:
        time.sleep(0.2)
        return ["late"]

    def broken(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> list[str]:
        raise ValueError("secret")

    def shout(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> list[str]:
        """In capitals."""
        return ["".join(inputs.values()).upper()]

    points = [SimpleNamespace(name=each.__name__, load=lambda each=each: each) for each in (slow, broken, shout)]
    monkeypatch.setattr(native.importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(native, "TIMEOUT_S", 0.05)
    company = Company(ScriptedEngine())
    session = company.session()
    x = session.add_variable("x", text="quiet")

    async def of(function: str) -> str:
        (made,) = session.add_step(SubmitStepRequest(function=function, inputs=[("x", x.id)], outputs=["o"]))
        return await ask(session, made.id)

    assert await of("shout") == "QUIET"
    with pytest.raises(DeadlineExceeded):
        await of("slow")
    with pytest.raises(FailedPrecondition) as error:
        await of("broken")
    assert "secret" not in error.value.message


async def test_steps_between_calls() -> None:
    company = Company(engine := ScriptedEngine(answer=lambda text: " yes; no "))
    session = company.session()
    o = call(session, "say {{o}}", o=output("o"))["o"]
    (stripped,) = session.add_step(SubmitStepRequest(function="strip", inputs=[("text", o)], outputs=["stripped"]))
    first, second = session.add_step(
        SubmitStepRequest(
            function="split", inputs=[("text", stripped.id)], settings={"separator": "; "}, outputs=["first", "second"]
        )
    )
    last = call(session, "not {{x}} but {{y}}: {{o}}", x=(second.id,), y=(first.id,), o=output("o"))["o"]
    await asyncio.sleep(0.05)
    assert engine.log == []
    await ask(session, last, Criterion.THROUGHPUT)
    assert engine.did("generate") == ["say ", "not no but yes: "]


async def test_a_step_that_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    company = Company(ScriptedEngine())
    session = company.session()
    x = session.add_variable("x", text="x")
    (made,) = session.add_step(SubmitStepRequest(function="strip", inputs=[("x", x.id)], outputs=["o"]))
    session.ask(made.id, Criterion.LATENCY)
    await company.programs.delete("t", session.id)
    assert made.error is not None
