"""Content to tokens: what a context that has tokens gets, and that long texts hold up nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text import ChatTemplate, ModelText
from jaxctx.model.text.sandbox import CPU_S
from jaxctx.model.text.tool_calls import REASONING_FORMATS, TOOL_CALL_FORMATS
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import PlanRequest
from jaxctx_server.tokenizer_pool import (
    EVENT_LOOP_CPU_S,
    MAX_INLINE_SIZE,
    MAX_SHARED_THREAD_SIZE,
    ContentPosition,
    EmptyContext,
    MiddleOfSequence,
    TokenizerPool,
)
from jaxctx_server.validate import Limits

WITH_SYSTEM = (
    "{% if messages[0].role != 'system' %}[system default]{% endif %}"
    "{% for message in messages %}[{{ message.role }} {{ message.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant {% endif %}"
)
WITH_BOS = "<|startoftext|>" + WITH_SYSTEM
REFUSING = (
    "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}<|startoftext|>{{ messages[0].content }}"
)
BOS = 257
HELLO = PlanRequest(messages=ChatMessages(messages=[{"role": "user", "content": "hello"}]))


def texts_of(text: ModelText, limits: Limits, template: str) -> TokenizerPool:
    return TokenizerPool(replace(text, chat_template=ChatTemplate(template), bos_id=BOS), limits)


@pytest.mark.parametrize(
    ("template", "first", "later"),
    [
        (WITH_SYSTEM, "[system default][user hello][assistant ", "[user hello][assistant "),
        (WITH_BOS, "<|startoftext|>[system default][user hello][assistant ", "[user hello][assistant "),
        (REFUSING, "<|startoftext|>hello", "hello"),
    ],
    ids=["system", "bos", "refusing"],
)
async def test_messages_start_or_continue_a_conversation(
    text: ModelText, limits: Limits, template: str, first: str, later: str
) -> None:
    texts = texts_of(text, limits, template)
    for before, written in ((EmptyContext(), first), (MiddleOfSequence(), later)):
        ids = await texts.tokens(HELLO, before)
        assert text.tokenizer.decode(ids, skip_special_tokens=False) == written
    texts.close()


async def test_many_empty_messages_leave_the_event_loop(text: ModelText, limits: Limits) -> None:
    threads: list[str] = []

    class Noting(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            threads.append(threading.current_thread().name)
            return super().render(*args, **kwargs)

    texts = TokenizerPool(replace(text, chat_template=Noting(WITH_SYSTEM)), limits)
    await texts.render(HELLO.messages)
    await texts.render(ChatMessages(messages=[{"role": "u", "content": ""}] * 1024))
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("jaxctx-text")
    texts.close()


@pytest.mark.parametrize(
    "before", [pytest.param(EmptyContext(), marks=pytest.mark.slow), MiddleOfSequence()], ids=["empty", "later"]
)
async def test_a_template_that_never_ends_leaves_the_event_loop_and_is_stopped(
    text: ModelText, limits: Limits, before: ContentPosition
) -> None:
    class Noting(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            begun = time.thread_time()
            try:
                return super().render(*args, **kwargs)
            finally:
                spent.append((threading.current_thread().name, time.thread_time() - begun))

    spent: list[tuple[str, float]] = []
    endless = "{% for i in range(100000) %}{% for i in range(100000) %}{% endfor %}{% endfor %}"
    texts = TokenizerPool(replace(text, chat_template=Noting(endless)), limits)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="takes too long") as raised:
            await texts.tokens(HELLO, before)
        assert raised.value.violations[0].field == "messages"
    here, *later = spent
    assert here[0] == threading.current_thread().name
    assert here[1] < 10 * EVENT_LOOP_CPU_S
    assert {name.startswith("jaxctx-long-text") for name, _ in later} == {True}
    assert all(cpu_s < 10 * CPU_S for _, cpu_s in later)
    texts.close()


async def test_long_texts_do_not_delay_others(text: ModelText, limits: Limits) -> None:
    gate = threading.Event()

    class Gated:
        max_token_bytes = None

        def encode(self, text: str, **_: Any) -> list[int]:
            assert len(text) <= MAX_SHARED_THREAD_SIZE or gate.wait(60)
            return [1]

    texts = TokenizerPool(replace(text, tokenizer=Gated()), limits)  # type: ignore[arg-type]
    long = [
        asyncio.create_task(texts.encode("x" * (MAX_SHARED_THREAD_SIZE + 1), add_special_tokens=True)) for _ in range(4)
    ]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(texts.encode("x" * (MAX_INLINE_SIZE + 1), add_special_tokens=True), 60) == [1]
    assert not any(task.done() for task in long)
    gate.set()
    assert await asyncio.gather(*long) == [[1]] * 4
    texts.close()


async def test_a_hopeless_text_is_refused_before_it_is_tokenised(text: ModelText, limits: Limits) -> None:
    class Counting:
        calls = 0
        max_token_bytes = 2

        def encode(self, text: str, **_: Any) -> list[int]:
            self.calls += bool(text)
            return [1]

    tokenizer = Counting()
    few = replace(limits, max_context_tokens=10)
    template = ChatTemplate("{{ messages[0].content }}")
    texts = TokenizerPool(replace(text, tokenizer=tokenizer, chat_template=template), few)  # type: ignore[arg-type]
    assert await texts.tokens(PlanRequest(text="é" * 10), EmptyContext()) == [1]
    for field, content in (
        ("text", PlanRequest(text="é" * 10 + "x")),
        ("messages", PlanRequest(messages={"messages": [{"role": "user", "content": "x" * 21}]})),
    ):
        with pytest.raises(InvalidArgument, match="1 to 10 tokens") as raised:
            await texts.tokens(content, EmptyContext())
        assert raised.value.violations[0].field == field
    assert tokenizer.calls == 1
    texts.close()


CALLING_TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for message in messages %}[{{ message.role }} {{ message.content }}{{ message.tool_call_id }}"
    "{% for call in message.tool_calls %}{{ call.id }}:{{ call.function.name }}{{ call.function.arguments.a }}"
    "{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant {% endif %}{{ more }}"
)
TOOL = '{"type": "function", "function": {"name": "f"}}'


@pytest.mark.parametrize("size", [1, 2 * MAX_INLINE_SIZE])
async def test_tools_and_calls_reach_the_template(text: ModelText, limits: Limits, size: int) -> None:
    """On the event loop, and on the thread of longer ones."""
    texts = texts_of(text, limits, CALLING_TEMPLATE)
    value = "x" * size
    chat = ChatMessages(
        messages=[
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": f'{{"a": "{value}"}}'}]},
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ],
        tools=[TOOL],
        template_arguments='{"more": "!"}',
    )
    rendered = await texts.render(chat)
    assert rendered.text == f"<f>[user u][assistant 1:f{value}][tool r1][assistant !"
    chat.messages[1].tool_calls[0].arguments = "[" + " " * size  # a template that looks for names has none
    assert (await texts.render(chat)).text == "<f>[user u][assistant 1:f][tool r1][assistant !"
    chat.messages[1].tool_calls[0].arguments = "[NaN]" + " " * size
    with pytest.raises(InvalidArgument) as raised:
        await texts.render(chat)
    assert raised.value.violations[0].field == "messages.messages[1].tool_calls[0].arguments"
    texts.close()


async def test_results_of_tools_are_a_next_turn(text: ModelText, limits: Limits) -> None:
    texts = texts_of(text, limits, CALLING_TEMPLATE)
    messages = [{"role": "tool", "content": "r", "tool_call_id": "1"}]
    ids = await texts.tokens(PlanRequest(messages={"messages": messages, "tools": [TOOL]}), MiddleOfSequence())
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == "[tool r1][assistant "
    texts.close()


async def test_a_last_message_that_is_continued_opens_no_answer(text: ModelText, limits: Limits) -> None:
    texts = texts_of(text, limits, CALLING_TEMPLATE)
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "So "}]
    chat = {"messages": messages, "continue_final_message": True}
    for before, written in ((EmptyContext(), "[user u][assistant So "), (MiddleOfSequence(), "[user u][assistant So ")):
        ids = await texts.tokens(PlanRequest(messages=chat), before)
        assert text.tokenizer.decode(ids, skip_special_tokens=False) == written
    texts.close()


async def test_the_formats_of_a_model(text: ModelText, limits: Limits) -> None:
    known = replace(
        text, tool_call_format=TOOL_CALL_FORMATS["hermes"], reasoning_format=REASONING_FORMATS["think_opened"]
    )
    for each, names in ((text, ("", "")), (known, ("hermes", "think_opened"))):
        texts = TokenizerPool(each, limits)
        assert (texts.formats.tool_calls, texts.formats.reasoning) == names
        assert texts.formats.special_markers == {}
        texts.close()


async def test_ids_of_calls_are_made_as_the_template_takes_them(text: ModelText, limits: Limits) -> None:
    mistral = replace(text, chat_template=ChatTemplate(CALLING_TEMPLATE), tool_call_format=TOOL_CALL_FORMATS["mistral"])
    texts = TokenizerPool(mistral, limits)
    rendered = await texts.render(ChatMessages(messages=[{"role": "tool", "tool_call_id": "call_1"}]))
    made = rendered.text.removeprefix("[tool ").removesuffix("][assistant ")
    assert made == TOOL_CALL_FORMATS["mistral"].template_call_id("call_1")
    texts.close()
