"""Programs on the real engine: greedy tokens equal those of each full prompt alone, and every page comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.programs.sessions import Programs, Session
from jaxctx.programs.tasks import Call, Task
from jaxctx.types import (
    CallOutput,
    CreateContextRequest,
    Criterion,
    GenerateRequest,
    Parameter,
    SamplingParams,
    SubmitCallRequest,
)
from tests.echo import echo_text
from tests.engines import Clock

TENANT = "t"
TEXT = echo_text()
TOKENS: dict[str, list[int]] = {}  # of every call, when the latest of its tasks had ended


async def encode(caller: Caller, text: str, start: bool) -> list[int]:
    return TEXT.tokenizer.encode(text, add_special_tokens=start)


def output(name: str, tokens: int) -> Parameter:
    settings = CallOutput(max_tokens=tokens, sampling=SamplingParams(temperature=0.0), ignore_eos=True)
    return Parameter(name=name, output=settings)


@pytest.fixture
def programs(clock: Clock) -> Programs:
    made = Programs(clock, prefix_timeout_s=30.0)
    ended = made.executor.task_ended

    def remember(task: Task) -> None:
        TOKENS[task.call.id] = list(task.call.tokens)
        ended(task)

    made.executor.task_ended = remember
    return made


def submit(session: Session, template: str, *parameters: Parameter) -> Call:
    return session.submit(SubmitCallRequest(template=template, parameters=parameters))


async def done(session: Session, call: Call) -> None:
    await session.request(call.tasks[-1].output.id, Criterion.LATENCY).wait()


async def alone(engine: LocalEngine, prompt: list[int], tokens: int) -> list[int]:
    """What a prompt gives that nothing shares."""
    caller = Caller("alone")
    context = await engine.create(caller, CreateContextRequest(salt="alone"))
    await engine.fill(caller, context.context_id, prompt)
    request = GenerateRequest(
        context_id=context.context_id, max_tokens=tokens, sampling=SamplingParams(temperature=0.0), ignore_eos=True
    )
    made = [token async for piece in engine.generate(caller, request) for token in piece.token_ids]
    await engine.close(caller, context.context_id)
    return made


SYSTEM = "You are a careful assistant who answers in one short sentence, and never guesses. "
assert len(TEXT.tokenizer.encode(SYSTEM, add_special_tokens=True)) % 16


@pytest.mark.parametrize("criterion", list(Criterion))
async def test_calls_over_shared_prefixes(engine: LocalEngine, programs: Programs, criterion: Criterion) -> None:
    """16 calls over a prefix that is no whole number of pages, a second level under it, and another prefix beside."""
    programs.dispatcher.engines.register("e", engine, encode)
    session = programs.create(TENANT, 60.0)
    two_level = SYSTEM + "The document says nothing of it. " * 3
    prompts = [(SYSTEM, f"question {n}? ") for n in range(16)]
    prompts += [(two_level, f"and {n}? ") for n in range(6)] + [("Another prefix, " * 4, f"{n}. ") for n in range(6)]
    calls = [
        submit(session, prefix + "{{q}}{{o}}", Parameter(name="q", text=rest), output("o", 9))
        for prefix, rest in prompts
    ]
    before = (await engine.stats()).tokens_computed
    await asyncio.gather(*(session.request(call.tasks[0].output.id, criterion).wait() for call in calls))
    encoded = [TEXT.tokenizer.encode(prefix + rest, add_special_tokens=True) for prefix, rest in prompts]
    await programs.delete(TENANT, session.id)
    left = await engine.list(Caller(TENANT), include_program_contexts=True)
    assert len(left) == 3  # the prefixes
    # Every page that prompts have in common was computed once, and every output token but the last.
    pages = {tuple(prompt[:end]) for prompt in encoded for end in range(16, len(prompt) + 1, 16)}
    computed = (await engine.stats()).tokens_computed - before
    assert computed == 16 * len(pages) + sum(len(prompt) % 16 for prompt in encoded) + 8 * len(prompts)
    for call, prompt in zip(calls, encoded, strict=True):
        assert TOKENS[call.id] == prompt + await alone(engine, prompt, 9)
    for info in left:
        await engine.close(Caller(TENANT), info.context_id)


async def test_a_prompt_is_tokenised_as_one_text(engine: LocalEngine, programs: Programs) -> None:
    """`th` is one token; here one half of it ends the constant prefix, and the other begins the input."""
    programs.dispatcher.engines.register("e", engine, encode)
    session = programs.create(TENANT, 60.0)
    prefix = SYSTEM + "Now t"
    call = submit(session, prefix + "{{q}}{{o}}", Parameter(name="q", text="he end"), output("o", 5))
    await done(session, call)
    prompt = await encode(Caller(), prefix + "he end", True)
    assert prompt != await encode(Caller(), prefix, True) + await encode(Caller(), "he end", False)
    assert TOKENS[call.id] == prompt + await alone(engine, prompt, 5)


async def test_text_after_an_output_follows_its_tokens(engine: LocalEngine, programs: Programs) -> None:
    programs.dispatcher.engines.register("e", engine, encode)
    session = programs.create(TENANT, 60.0)
    x = session.create_variable("x", text="that")
    call = submit(
        session,
        "First: {{a}} then {{x}}: {{b}}{{c}}",
        Parameter(name="x", variable_id=x.id),
        *(output(name, 7) for name in "abc"),
    )
    await done(session, call)
    first = await alone(engine, await encode(Caller(), "First: ", True), 7)
    middle = [*await encode(Caller(), "First: ", True), *first, *await encode(Caller(), " then that: ", False)]
    second = await alone(engine, middle, 7)
    third = await alone(engine, middle + second, 7)
    assert TOKENS[call.id] == middle + second + third
    await programs.executor.wait_until_released(TENANT)
    assert await engine.list(Caller(TENANT), include_program_contexts=True) == []


async def test_another_engine_goes_on_where_one_was_lost(make_engine, echo_served, programs: Programs) -> None:
    one, two = make_engine(), make_engine(served=replace(echo_served, revision="of a device of its own"), whole=False)
    registry = programs.dispatcher.engines
    node = registry.register("one", one, encode)
    session = programs.create(TENANT, 60.0)
    call = submit(session, SYSTEM + "{{o}}", output("o", 60))
    variable = session.request(call.tasks[0].output.id, Criterion.LATENCY)
    parts = []
    async for part in variable.read():
        parts.append(part)
        if node.id in registry.handles:
            registry.register("two", two, encode)
            registry.lose(node)
    prompt = await encode(Caller(), SYSTEM, True)
    assert TOKENS[call.id] == prompt + await alone(two, prompt, 60)
    assert call.tasks[0].engine_id == "two"
    assert "".join(parts) == variable.text
    await programs.delete(TENANT, session.id)
    assert (
        await one.list(Caller(TENANT), include_program_contexts=True) == []
    )  # the call's is closed, as this engine still lives


async def test_a_prefix_lives_until_its_timeout(engine: LocalEngine, programs: Programs, clock: Clock) -> None:
    programs.dispatcher.engines.register("e", engine, encode)
    session = programs.create(TENANT, 600.0)
    for _ in range(3):
        await done(session, submit(session, SYSTEM + "{{o}}", output("o", 2)))
        await programs.executor.wait_until_released(TENANT)
        (prefix,) = await engine.list(Caller(TENANT), include_program_contexts=True)
        clock.offset += 20.0  # less than the timeout, which every use begins again
    clock.offset += 20.0
    assert await engine.list(Caller(TENANT), include_program_contexts=True) == []
    await done(session, submit(session, SYSTEM + "{{o}}", output("o", 2)))
    await programs.executor.wait_until_released(TENANT)
    (again,) = await engine.list(Caller(TENANT), include_program_contexts=True)
    assert again.context_id != prefix.context_id
