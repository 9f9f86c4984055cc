"""The executor: contexts of calls and prefixes on engines, and outputs that go on at another engine after a loss.

A resumed output is the same token for token as one that nothing disturbed. This is tested on the echo model with
byte-level BPE, whose outputs would be tokenised otherwise than they were drawn: pairs of letters come as one token or
two, and characters in parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.programs import dispatcher
from jaxctx.programs.sessions import Programs
from jaxctx.types import (
    CallOutput,
    CreateContextRequest,
    Criterion,
    GenerateRequest,
    OutputFormat,
    Parameter,
    SamplingParams,
    SubmitCallRequest,
    VariableState,
)
from tests.echo import EOS_ID, echo_text
from tests.engines import SMALL, Clock
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop
from tests.jaxctx.programs.scripted import ScriptedEngine

TENANT = "t"
TEXT = echo_text()
PROMPT = "# module number 7\nimport "
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PENALISED = replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logit_bias={7: 2.0})
ENDING = replace(DRAWN, logit_bias={EOS_ID: 60.0})

SETTINGS: dict[str, CallOutput] = {
    "greedy": CallOutput(max_tokens=90, sampling=SamplingParams(temperature=0.0), ignore_eos=True),
    "seeded": CallOutput(max_tokens=90, sampling=DRAWN),
    "penalties": CallOutput(max_tokens=90, sampling=PENALISED, ignore_eos=True),
    "min_tokens": CallOutput(max_tokens=90, min_tokens=61, sampling=ENDING),
    "a format": CallOutput(max_tokens=90, sampling=DRAWN, output_format=OutputFormat(regex="[xyz]{40,60}")),
    "the engine's own max_tokens": CallOutput(sampling=DRAWN, ignore_eos=True),
}


async def encode(caller: Caller, text: str, start: bool) -> list[int]:
    return TEXT.tokenizer.encode(text, add_special_tokens=start)


async def undisturbed(engine: LocalEngine, settings: CallOutput) -> tuple[list[int], str]:
    """Tokens and text of an output that one engine makes, of a context of its own."""
    caller = Caller("alone")
    context = await engine.create(caller, CreateContextRequest(salt="alone"))
    await engine.fill(caller, context.context_id, await encode(Caller(), PROMPT, True))
    request = GenerateRequest(
        context_id=context.context_id,
        max_tokens=settings.max_tokens,
        min_tokens=settings.min_tokens,
        sampling=settings.sampling,
        stop=settings.stop,
        stop_token_ids=settings.stop_token_ids,
        ignore_eos=settings.ignore_eos,
        include_stop=settings.include_stop,
        output_format=settings.output_format,
    )
    pieces = [piece async for piece in engine.generate(caller, request)]
    await engine.close(caller, context.context_id)
    return [token for piece in pieces for token in piece.token_ids], "".join(piece.text for piece in pieces)


class Losing:
    """Two engines, of which whichever works on the output is lost after so many tokens, and comes back at once."""

    def __init__(self, programs: Programs, engines: Sequence[LocalEngine]) -> None:
        self.programs = programs
        self.engines = engines
        self.registry = programs.dispatcher.engines
        self.losses = 0
        for number, engine in enumerate(engines):
            self.registry.register(str(number), engine, encode)

    async def output(self, settings: CallOutput, every: int) -> tuple[list[int], str]:
        """Tokens and text of an output, with a loss after every so many of its tokens."""
        session = self.programs.create(TENANT, 600.0)
        parameter = Parameter(name="o", output=settings)
        call = session.submit(SubmitCallRequest(template=PROMPT + "{{o}}", parameters=[parameter], timeout_s=600))
        task, prompt, read = call.tasks[0], len(await encode(Caller(), PROMPT, True)), ""
        variable, next_loss = session.request(task.output.id, Criterion.LATENCY), every
        tokens: list[int] = []
        async for part in variable.read():
            read += part
            tokens = call.tokens[prompt:] or tokens
            if not task.output_complete and len(tokens) >= next_loss:
                next_loss = len(tokens) + every
                self.lose(task.engine_id)
        await self.programs.delete(TENANT, session.id)
        assert read == variable.text
        return tokens, read

    def lose(self, engine_id: str) -> None:
        self.losses += 1
        self.registry.lose(self.registry.handles[engine_id])
        self.registry.register(engine_id, self.engines[int(engine_id)], encode)


@pytest.fixture
def programs(clock: Clock) -> Programs:
    return Programs(clock, prefix_timeout_s=30.0)


@pytest.fixture
async def losing(make_engine, echo_served, programs: Programs) -> Losing:  # type: ignore[no-untyped-def]
    other = replace(echo_served, revision="of a device of its own")
    config: EngineConfig = replace(SMALL, default_max_tokens=70)
    return Losing(programs, [make_engine(config), make_engine(config, served=other, whole=False)])


@pytest.mark.parametrize("every", [1, 7, 30])
@pytest.mark.parametrize("name", SETTINGS)
async def test_losing_engines_does_not_change_an_output(losing: Losing, name: str, every: int) -> None:
    settings = SETTINGS[name]
    tokens, text = await undisturbed(losing.engines[0], settings)
    resumed_tokens, read = await losing.output(settings, every)
    assert losing.losses >= min(2, len(tokens) // every - 1)
    assert read == text
    assert resumed_tokens == tokens[: len(resumed_tokens)]


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_that_begins_at_one_engine_and_ends_at_another(losing: Losing, include_stop: bool) -> None:
    settings = CallOutput(max_tokens=90, sampling=DRAWN, ignore_eos=True, include_stop=include_stop)
    _, text = await undisturbed(losing.engines[0], settings)
    stop = text[50:58]
    settings = replace(settings, stop=[text[20:27] + "never said", stop])
    _, stopped = await undisturbed(losing.engines[0], settings)
    assert stopped == text[: text.index(stop) + (len(stop) if include_stop else 0)]
    for every in (1, 2, 5):
        _, read = await losing.output(settings, every)
        assert read == stopped
    assert losing.losses > 10


async def test_an_output_without_a_seed_keeps_the_one_that_it_began_with(losing: Losing) -> None:
    """It is drawn at random, yet as one output: the seed that one engine began with is that of the next."""
    seeds: list[int | None] = []
    for engine in losing.engines:
        engine.generate = _noting(engine, seeds)  # type: ignore[method-assign]
    await losing.output(CallOutput(max_tokens=40, ignore_eos=True), every=5)
    assert losing.losses > 2
    assert len(seeds) > 2
    assert len(set(seeds)) == 1
    assert seeds[0] is not None


def _noting(engine: LocalEngine, seeds: list[int | None]):  # type: ignore[no-untyped-def]
    generate = engine.generate

    def noting(caller: Caller, request: GenerateRequest):  # type: ignore[no-untyped-def]
        seeds.append(request.sampling.seed)
        return generate(caller, request)

    return noting


async def test_many_outputs_at_once(losing: Losing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of both engines' work is lost at every loss.

    Here it is chance whether an output gets a token between several losses of others' making. What becomes of one that
    gets none is tested in `test_engine_failure.py`.
    """
    monkeypatch.setattr(dispatcher, "MAX_FAILURE_SCORE", 1000)
    wanted = [replace(SETTINGS["penalties"], sampling=replace(PENALISED, seed=seed)) for seed in range(6)]
    alone = [await undisturbed(losing.engines[0], settings) for settings in wanted]
    made = await asyncio.gather(*[losing.output(settings, every=9) for settings in wanted])
    assert [text for _, text in made] == [text for _, text in alone]
    assert losing.losses > 6


def test_the_model_makes_text_that_would_be_tokenised_otherwise() -> None:
    """Else these tests could not fail where a text is tokenised again."""
    ids = [TEXT.tokenizer.token_id("t"), TEXT.tokenizer.token_id("h")]
    assert None not in ids
    assert TEXT.tokenizer.encode(TEXT.tokenizer.decode(ids)) != ids


# --- Contexts of calls and prefixes, over scripted engines

LONG_PREFIX = "You are a careful assistant who answers in one short sentence and never guesses. "


async def test_calls_of_one_template_share_its_constant_prefix() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(), prefix_timeout_s=77.0)
    one, two = harness.session(), harness.session()
    asked = [
        ask(session, call(session, LONG_PREFIX + "{{q}}? {{o}}", q=question, o=output("o"))["o"])
        for session, question in ((one, "who"), (one, "what"), (two, "why"))
    ]
    texts = await asyncio.gather(*asked)
    assert texts == [f"<{(LONG_PREFIX + question + '? ')[-12:]}>" for question in ("who", "what", "why")]
    await run_event_loop()
    assert len([text for text in engine.did("compute") if LONG_PREFIX in text]) == 1
    assert list(map(len, engine.contexts.values())) == [64]  # the prefix's whole pages alone are left
    await harness.programs.delete("t", one.id)
    assert len(engine.contexts) == 1
    # Its time to live ends it; then the next call makes it again.
    engine.contexts.clear()
    assert (
        await ask(two, call(two, LONG_PREFIX + "{{q}}? {{o}}", q="how", o=output("o"))["o"])
        == f"<{(LONG_PREFIX + 'how? ')[-12:]}>"
    )
    assert len([text for text in engine.did("compute") if LONG_PREFIX in text]) == 2
    await run_event_loop()
    assert len(engine.contexts) == 1


async def test_nothing_is_shared_between_tenants() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    for tenant in ("a", "b"):
        session = harness.session(tenant)
        await ask(session, call(session, LONG_PREFIX + "{{q}}? {{o}}", q="who", o=output("o"))["o"])
    assert len([text for text in engine.did("compute") if LONG_PREFIX in text]) == 2
    assert {tenant for tenant, _ in engine.contexts} == {"a", "b"}


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
