"""Programs as both clients write them, against the engine on the echo model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import jaxctx
from jaxctx import Input, Output, Template, errors, semantic
from tests.e2e.program_callers import SYSTEM

FEW = Output(max_tokens=8, temperature=0, ignore_eos=True)


@semantic
def draft(topic: Input, tone: Input = "plainly", text: Output = FEW) -> None:  # type: ignore[assignment]
    """
    You draft:
        {{topic}}, {{tone}}
    {{text}}"""


async def alone(client: jaxctx.aio.Client, prompt: str, tokens: int = 8) -> str:
    async with await client.create(prompt, salt="alone") as context:
        return str(await context.complete(max_tokens=tokens, temperature=0, ignore_eos=True))


async def test_a_function_whose_docstring_is_the_template(client: jaxctx.aio.Client) -> None:
    assert draft.text == "You draft:\n    {{topic}}, {{tone}}\n{{text}}"
    async with await client.create_session() as session:
        plain = await draft(session, topic="pages")
        topic = await session.create_variable("topic")
        loud = await session.call(draft, topic=topic, tone="loudly")
        both = await session.call("{{a}} or {{b}}? {{o}}", a=plain, b=loud["text"], o=FEW)
        asking = asyncio.create_task(session.gather(plain.output, loud.output, both.output))
        await asyncio.sleep(0.05)
        assert not asking.done()
        assert (await topic.set("forks")).state is jaxctx.VariableState.SET
        a, b, o = await asking
        assert a == await alone(client, "You draft:\n    pages, plainly\n")
        assert b == await alone(client, "You draft:\n    forks, loudly\n")
        assert o == await alone(client, f"{a} or {b}? ")
        assert "".join([part async for part in both.output.read()]) == o
        assert [task.phase for task in await session.graph()] == [jaxctx.TaskPhase.DONE] * 3
        assert {each.name async for each in session.variables(page=1)} == {"topic", "text", "o"}
        info = await session.info()
        assert (info.session_id, info.variables, info.calls) == (session.id, 4, 3)
    with pytest.raises(errors.NotFound):
        await client.session(session.id)
    await session.close()  # twice is no error


async def test_the_blocking_client(address: str) -> None:
    """All of it without an event loop; a thread, as the server is in this one."""

    def program() -> None:
        with jaxctx.Client(address, timeout_s=60) as client:
            with client.create_session("mine", ttl_s=90) as session:
                first = session.call(SYSTEM + "{{o}}", o=FEW)
                second = draft(session, topic=first)
                texts = session.gather(second.output, first.output)
                assert "".join(second["text"].read()) == texts[0]
                assert session.variable(first.output.id).get() == texts[1]
                assert session.info().ttl_s == 90
                assert [each.id for each in client.sessions()] == ["mine"]
                assert client.session("mine").variable(first.output.id).inspect().text == texts[1]
                with pytest.raises(errors.AlreadyExists):
                    client.create_session("mine")
            with pytest.raises(errors.NotFound):
                client.session("mine")

    await asyncio.to_thread(program)


async def test_a_variable_is_made_by_its_name(client: jaxctx.aio.Client, address: str) -> None:
    async with await client.create_session("mine") as session:
        made = await session.create_variable("topic")
        assert made.name == "topic"
        told = await made.inspect()
        assert (told.name, told.state, told.text) == ("topic", jaxctx.VariableState.UNSET, "")
        whole = await session.create_variable("tone", text="plainly", description="how to say it")
        told = await whole.inspect()
        assert (told.name, told.text, told.description) == ("tone", "plainly", "how to say it")
        assert await whole.get() == "plainly"
        with pytest.raises(TypeError):
            await session.create_variable("tone", "plainly")  # type: ignore[misc]

        def blocking() -> None:
            with jaxctx.Client(address, timeout_s=60) as other:
                variable = other.session("mine").create_variable("length")
                assert (variable.name, variable.inspect().state) == ("length", jaxctx.VariableState.UNSET)

        await asyncio.to_thread(blocking)


async def test_what_is_generated_has_no_number_by_place(client: jaxctx.aio.Client) -> None:
    """One that counts tokens would have been taken for how many outputs."""
    async with await client.create("Say ") as context:
        with pytest.raises(TypeError):
            context.generate(40)  # type: ignore[misc]
        assert [each async for each in client.contexts()] != []


async def test_native_steps_by_name(client: jaxctx.aio.Client) -> None:
    first_word = Template(function="split", given={"separator": " ", "word": Output()})
    async with await client.create_session() as session:
        drafts = await session.call("Draft: {{o}}", o=FEW)
        word = await first_word(session, text=drafts)
        said = await session.call("Review of {{word}}: {{o}}", word=word, o=FEW)
        expected = (await drafts.output.get()).split(" ")[0]
        assert await said.output.get() == await alone(client, f"Review of {expected}: ")
        assert await word["word"].get() == expected
        assert [task.function for task in await session.graph()] == ["", "split", ""]
        with pytest.raises(errors.InvalidArgument, match="json_pointer, split"):
            await Template(function="rm", given={"o": Output()})(session)


async def test_an_output_that_nobody_asks_for_does_not_run(client: jaxctx.aio.Client) -> None:
    async with await client.create_session() as session:
        call = await session.call("Say {{o}}", o=FEW)
        assert (await call.output.inspect()).state is jaxctx.VariableState.UNSET
        assert [task.phase for task in await session.graph()] == [jaxctx.TaskPhase.IDLE]
        await session.cancel(call.id)
        with pytest.raises(errors.Cancelled):
            await call.output.get()
        told = await call.output.inspect()
        assert (told.state, told.error_reason) == (jaxctx.VariableState.FAILED, "CANCELLED")
        asked = await session.call("Say {{o}}", o=Output(max_tokens=4, criterion=jaxctx.Criterion.THROUGHPUT))
        assert await asked.output.inspect(wait=True)


async def test_reading_that_is_left_cancels_nothing(client: jaxctx.aio.Client) -> None:
    async with await client.create_session() as session:
        story = (await session.call("Tell: {{o}}", o=Output(max_tokens=200, temperature=0, ignore_eos=True))).output
        reading: Any = story.read()
        beginning = await anext(reading)
        await reading.aclose()
        assert (await story.get()).startswith(beginning)


async def test_what_is_wrong_is_told_before_anything_runs(client: jaxctx.aio.Client) -> None:
    async with await client.create_session() as session:
        with pytest.raises(TypeError, match="topic"):
            await draft(session)
        with pytest.raises(TypeError, match="max_token"):
            Output(max_token=3)  # type: ignore[call-arg]
        with pytest.raises(errors.InvalidArgument) as raised:
            await session.call("Say {{x}} {{o}}", x=5, o=FEW)
        assert [each.field for each in raised.value.violations] == ["parameters[0].text"]
        with pytest.raises(errors.InvalidArgument):
            await session.call("Say {{o}}", o=Output(max_tokens=0))
        with pytest.raises(errors.NotFound) as none:
            await session.variable("none")
        assert none.value.reason == "VARIABLE_NOT_FOUND"
        with pytest.raises(errors.DeadlineExceeded):
            await (await session.create_variable("late")).get(timeout_s=0.2)
        late = await session.call(
            Template(text="{{x}} {{o}}", limit_s=0.2), x=await session.create_variable("late"), o=FEW
        )
        with pytest.raises(errors.DeadlineExceeded):
            await late.output.get()
        assert (await session.info()).started == 0


def test_what_no_function_may_be() -> None:
    def unannotated(x, o: Output) -> None:  # type: ignore[no-untyped-def]
        """{{x}} {{o}}"""

    def placeless(x: Input, o: Output) -> None:
        """{{o}}"""

    def reserved(x: Input, timeout_s: Input, o: Output) -> None:
        """{{x}} {{timeout_s}} {{o}}"""

    for function, name in ((unannotated, "x"), (placeless, "x"), (reserved, "timeout_s")):
        with pytest.raises(TypeError, match=f"{function.__name__}: {name}"):
            semantic(function)

    @semantic
    def plain(x: Input, o: Output) -> None:
        """{{x}} {{o}}"""

    settings = replace(plain, model_id="echo", limit_s=3)
    assert (settings.model_id, settings.limit_s, settings.inputs) == ("echo", 3, {"x"})
    assert settings.given["o"].options == {}  # type: ignore[union-attr]
