"""Calls of tools and thoughts in answers, whole and in parts, of a model whose output is scripted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import openai
import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.tool_calls import ReasoningDelta, TextDelta
from jaxctx.types import FinishReason
from jaxctx_server.http.openai.chat_output import ThoughtCounter, joined
from tests.server.http.openai.harness import openai_client
from tests.server.http.scripted import scripted_server

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
CALL = ("<tool_", 'call>\n{"name": "weather", "argu', 'ments": {"city": "Pa', 'ris"}}\n</tool_call>')
SECOND = ('\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',)
ASKED: Any = {"model": "fake", "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 50}


@dataclass
class Told:
    """An answer, whichever way it came."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Any = None


def told_whole(answer: Any) -> Told:
    (choice,) = answer.choices
    message = choice.message
    told = Told(message.content or "", finish_reason=choice.finish_reason, usage=answer.usage)
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    told.reasoning = extra.get("reasoning", "")
    for call in message.tool_calls or ():
        told.calls.append({"id": call.id, "name": call.function.name, "arguments": call.function.arguments})
    return told


async def told_in_parts(stream: Any) -> Told:
    told = Told()
    roles = []
    async for chunk in stream:
        told.usage = chunk.usage
        for choice in chunk.choices:
            roles.append(choice.delta.role)
            told.text += choice.delta.content or ""
            told.reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
            told.finish_reason = choice.finish_reason or told.finish_reason
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(told.calls)
                    told.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                told.calls[call.index]["arguments"] += call.function.arguments
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    return told


async def ask(api: openai.AsyncOpenAI, streams: bool, **fields: Any) -> Told:
    if not streams:
        return told_whole(await api.chat.completions.create(**{**ASKED, **fields}))
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    return await told_in_parts(await api.chat.completions.create(**{**ASKED, **fields, **options}))


@pytest.mark.parametrize("streams", [False, True])
class TestCalls:
    async def test_a_call_behind_text(self, streams: bool) -> None:
        async with scripted_server("Let me ", "look. ", *CALL) as scripted, openai_client(scripted.web) as api:
            told = await ask(api, streams, tools=[WEATHER])
        assert told.text == "Let me look. "
        (call,) = told.calls
        assert call["name"] == "weather"
        assert json.loads(call["arguments"]) == {"city": "Paris"}
        assert call["id"].startswith("call_")
        assert told.finish_reason == "tool_calls"

    async def test_several_calls(self, streams: bool) -> None:
        async with scripted_server(*CALL, *SECOND) as scripted, openai_client(scripted.web) as api:
            told = await ask(api, streams, tools=[WEATHER, TIME])
            one = await ask(api, streams, tools=[WEATHER, TIME], parallel_tool_calls=False)
        assert [call["name"] for call in told.calls] == ["weather", "time"]
        assert len({call["id"] for call in told.calls}) == 2
        assert [call["name"] for call in one.calls] == ["weather"]

    async def test_no_call_where_none_is_allowed(self, streams: bool) -> None:
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
                told = await ask(api, streams, **fields)
                assert (told.text, told.calls, told.finish_reason) == ("".join(CALL), [], "stop")

    async def test_a_tool_that_is_not_allowed_is_not_called(self, streams: bool) -> None:
        named = {"type": "function", "function": {"name": "time"}}
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            told = await ask(api, streams, tools=[WEATHER, TIME], tool_choice=choice)
        assert (told.text, told.calls) == ("".join(CALL), [])

    async def test_a_call_that_breaks_off(self, streams: bool) -> None:
        async with (
            scripted_server(*CALL[:3], finish=FinishReason.LENGTH) as scripted,
            openai_client(scripted.web) as api,
        ):
            told = await ask(api, streams, tools=[WEATHER])
        assert [call["arguments"] for call in told.calls] == ['{"city": "Pa']
        assert told.finish_reason == "length"

    async def test_calls_that_are_demanded_are_held_to_a_grammar(self, streams: bool) -> None:
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
                told = await ask(api, streams, tools=[WEATHER, TIME], tool_choice=choice)
                assert told.finish_reason == "tool_calls"
            grammars = [request.output_format for request in scripted.engine.requests]
        assert all(each is not None for each in grammars)
        assert "time" in str(grammars[0])
        assert "time" not in str(grammars[1])

    async def test_the_history_of_calls(self, streams: bool) -> None:
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            (call,) = (await ask(api, streams, tools=[WEATHER])).calls
            function = {"name": call["name"], "arguments": call["arguments"]}
            made = {"id": call["id"], "type": "function", "function": function}
            history: Any = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "Rain."}]},
            ]
            assert (await ask(api, streams, tools=[WEATHER], messages=history)).calls


FUNCTIONS: Any = [WEATHER["function"], TIME["function"]]


@pytest.mark.parametrize("streams", [False, True])
class TestFunctions:
    """The older form of tools, as an older client reads it."""

    async def ask(self, api: openai.AsyncOpenAI, streams: bool, **fields: Any) -> tuple[Any, str, str | None]:
        """Name and arguments of the call (None: none), the text, and why it ended."""
        asked = {**ASKED, "functions": FUNCTIONS, **fields}
        if not streams:
            (choice,) = (await api.chat.completions.create(**asked)).choices
            called = choice.message.function_call
            assert choice.message.tool_calls is None
            call = None if called is None else [called.name, called.arguments]
            return call, choice.message.content or "", choice.finish_reason
        call, text, finish_reason = None, "", None
        async for chunk in await api.chat.completions.create(**asked, stream=True):
            (part,) = chunk.choices
            assert part.delta.tool_calls is None
            text += part.delta.content or ""
            finish_reason = part.finish_reason or finish_reason
            called = part.delta.function_call
            if called is not None and called.name is not None:
                assert call is None
                call = [called.name, ""]
            if called is not None:
                call[1] += called.arguments
        return call, text, finish_reason

    async def test_a_call(self, streams: bool) -> None:
        async with scripted_server("Let me look. ", *CALL) as scripted, openai_client(scripted.web) as api:
            call, text, finish_reason = await self.ask(api, streams)
        assert (call[0], json.loads(call[1])) == ("weather", {"city": "Paris"})
        assert (text, finish_reason) == ("Let me look. ", "function_call")

    async def test_one_call_at_most(self, streams: bool) -> None:
        async with scripted_server(*CALL, *SECOND) as scripted, openai_client(scripted.web) as api:
            call, _, finish_reason = await self.ask(api, streams)
        assert (call[0], finish_reason) == ("weather", "function_call")

    async def test_none_where_none_is_allowed(self, streams: bool) -> None:
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            told = await self.ask(api, streams, function_call="none")
            assert told == (None, "".join(CALL), "stop")

    async def test_a_call_that_is_demanded_is_held_to_a_grammar(self, streams: bool) -> None:
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            call, _, finish_reason = await self.ask(api, streams, function_call={"name": "weather"})
            assert (call[0], finish_reason) == ("weather", "function_call")
            (request,) = scripted.engine.requests
        assert request.output_format is not None
        assert "time" not in str(request.output_format)

    async def test_the_history_of_calls(self, streams: bool) -> None:
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            called = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}
            result = {"role": "function", "name": "weather", "content": "Rain."}
            history = [{"role": "user", "content": "Weather?"}, called, result]
            assert (await self.ask(api, streams, messages=history))[0]


@pytest.mark.parametrize("streams", [False, True])
class TestThoughts:
    async def test_before_an_answer(self, streams: bool) -> None:
        script = ("<th", "ink>First, ", "this.</think>", "\n\nThat.")
        async with scripted_server(*script, reasoning="think") as scripted, openai_client(scripted.web) as api:
            told = await ask(api, streams)
            silent = await ask(api, streams, extra_body={"include_reasoning": False})
        assert (told.reasoning, told.text, told.finish_reason) == ("First, this.", "That.", "stop")
        assert told.usage.completion_tokens_details.reasoning_tokens == 3
        assert (silent.reasoning, silent.text, silent.usage) == ("", "That.", told.usage)

    async def test_that_are_all(self, streams: bool) -> None:
        server = scripted_server("<think>on ", "and on", finish=FinishReason.LENGTH, reasoning="think")
        async with server as scripted, openai_client(scripted.web) as api:
            told = await ask(api, streams)
        assert (told.reasoning, told.text, told.finish_reason) == ("on and on", "", "length")
        assert told.usage.completion_tokens_details.reasoning_tokens == 2

    async def test_none_in_a_text_of_a_format(self, streams: bool) -> None:
        """It has the format from its first character on, also where the template has opened thoughts."""
        async with (
            scripted_server('{"a"', ": 1}", reasoning="think_opened") as scripted,
            openai_client(scripted.web) as api,
        ):
            told = await ask(api, streams, response_format={"type": "json_object"})
        assert (told.reasoning, told.text) == ("", '{"a": 1}')


THINKING = ("<|channel|>", "analysis<|mess", "age|>First, ", "this.<|end|><|start|>", "assistant")
HEADER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
SAID = ("<|channel|>final<|message|>", "That", " <.")


@pytest.mark.parametrize("streams", [False, True])
class TestChannels:
    """Outputs in messages of which each has a channel."""

    async def told(self, streams: bool, *script: str, finish: FinishReason = FinishReason.STOP, **fields: Any) -> Told:
        server = scripted_server(*script, finish=finish, tool_calls="harmony", reasoning="harmony")
        async with server as scripted, openai_client(scripted.web) as api:
            return await ask(api, streams, **fields)

    @pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}])
    async def test_thoughts_and_an_answer(self, streams: bool, fields: dict[str, Any]) -> None:
        told = await self.told(streams, *THINKING, *SAID, **fields)
        assert (told.reasoning, told.text, told.calls, told.finish_reason) == ("First, this.", "That <.", [], "stop")
        assert told.usage.completion_tokens_details.reasoning_tokens >= 3

    async def test_a_call_behind_a_preamble(self, streams: bool) -> None:
        preamble = ("<|channel|>commentary<|message|>Let me ", "look.<|end|><|start|>assistant")
        told = await self.told(streams, *THINKING, *preamble, HEADER, '{"city": ', '"Paris"}', tools=[WEATHER])
        assert (told.reasoning, told.text, told.finish_reason) == ("First, this.", "Let me look.", "tool_calls")
        assert [(call["name"], call["arguments"]) for call in told.calls] == [("weather", '{"city": "Paris"}')]

    async def test_no_call_where_none_is_allowed(self, streams: bool) -> None:
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [TIME]}):
            told = await self.told(streams, *THINKING, HEADER, "{}", **fields)
            assert (told.reasoning, told.text, told.calls) == ("First, this.", HEADER + "{}", [])
            assert told.finish_reason == "stop"

    async def test_an_output_that_breaks_off(self, streams: bool) -> None:
        for script, arguments in (((HEADER[:30],), []), ((HEADER, '{"ci'), ['{"ci'])):
            told = await self.told(streams, *THINKING, *script, finish=FinishReason.LENGTH, tools=[WEATHER])
            assert (told.text, [call["arguments"] for call in told.calls]) == ("", arguments)
            assert told.finish_reason == "length"

    async def test_an_answer_that_goes_on(self, streams: bool) -> None:
        """Its header is in the prompt, so the output has none."""
        messages: Any = [*ASKED["messages"], {"role": "assistant", "content": "So"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        told = await self.told(streams, " it", " is.", messages=messages, extra_body=extra)
        assert (told.reasoning, told.text) == ("", " it is.")

    async def test_a_text_of_a_format(self, streams: bool) -> None:
        """There may be thoughts before it."""
        script = (*THINKING, SAID[0], '{"a"', ": 1}")
        told = await self.told(streams, *script, response_format={"type": "json_object"})
        assert (told.reasoning, told.text) == ("First, this.", '{"a": 1}')


class TestAFormatBesideTools:
    """An agent that answers in JSON calls its tools first."""

    SCHEMA: ClassVar[Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    FORMAT: ClassVar[Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

    @pytest.mark.parametrize("script", [CALL, ('{"name"', ': "a"}')])
    async def test_either_may_come(self, script: Sequence[str]) -> None:
        async with scripted_server(*script) as scripted:
            body = {**ASKED, "tools": [WEATHER], "response_format": self.FORMAT}
            (choice,) = (await scripted.web("POST", "/v1/chat/completions", body)).json["choices"]
            (request,) = scripted.engine.requests
        assert request.output_format is not None
        assert '"name"' in str(request.output_format.grammar)
        assert "weather" in str(request.output_format.grammar)
        is_call = script == CALL
        assert choice["finish_reason"] == ("tool_calls" if is_call else "stop")
        assert (choice["message"].get("content") is None) == is_call

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    async def test_a_demanded_call_does_without_a_text(self, choice: Any) -> None:
        async with scripted_server(*CALL) as scripted:
            body = {**ASKED, "tools": [WEATHER], "tool_choice": choice}
            for each in (body, {**body, "response_format": self.FORMAT}):
                answer = await scripted.web("POST", "/v1/chat/completions", each)
                assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
            without, beside = scripted.engine.requests
        assert without.output_format == beside.output_format

    async def test_errors_of_the_grammar_name_what_asked_for_it(self) -> None:
        async with scripted_server("x") as scripted:
            body = {**ASKED, "tools": [WEATHER], "response_format": self.FORMAT}
            for choice, field in (("auto", "response_format"), ("required", "tools")):
                scripted.engine.error = InvalidArgument.field("output_format.grammar", "is too large")
                answer = await scripted.web("POST", "/v1/chat/completions", {**body, "tool_choice": choice})
                assert answer.error == (400, "INVALID_FIELD", field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}},
            "tool_choice.function.name",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"echo": True}, "echo"),
        ({"store": True}, "store"),
    ],
)
async def test_a_field_that_is_refused(fields: dict[str, Any], field: str) -> None:
    async with scripted_server("x") as scripted:
        answer = await scripted.web("POST", "/v1/chat/completions", {**ASKED, **fields})
        assert answer.error == (400, "INVALID_FIELD", field)
        assert not scripted.engine.contexts


async def test_tools_of_a_model_whose_format_is_not_known() -> None:
    async with scripted_server("x", tool_calls=None) as scripted:
        answer = await scripted.web("POST", "/v1/chat/completions", {**ASKED, "tools": [WEATHER]})
        assert answer.error == (400, "INVALID_FIELD", "tools")


def test_neighbouring_pieces_are_one() -> None:
    events = [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), TextDelta("d"), ReasoningDelta("e")]
    assert joined(events) == [ReasoningDelta("ab"), TextDelta("cd"), ReasoningDelta("e")]


def test_thoughts_are_counted_up_to_the_answer() -> None:
    counter = ThoughtCounter()
    for events, tokens in (([], 1), ([ReasoningDelta("a")], 2), ([], 4), ([TextDelta("b")], 8), ([TextDelta("c")], 16)):
        counter.count(events, tokens)
    assert counter.tokens == 1 + 2 + 4
    both = ThoughtCounter()
    both.count([ReasoningDelta("a"), TextDelta("b")], 5)  # of which some are thoughts
    assert both.tokens == 5
    again = ThoughtCounter()  # as gpt-oss may, behind a text
    for events, tokens in (([TextDelta("Let me see.")], 4), ([], 2), ([ReasoningDelta("hm")], 3), ([], 5)):
        again.count(events, tokens)
    again.count([TextDelta("So")], 7)
    assert again.tokens == 2 + 3 + 5
    plain = ThoughtCounter()
    plain.count([TextDelta("a")], 5)
    assert plain.tokens == 0
