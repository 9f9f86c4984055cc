"""Outputs as the API tells them: calls of tools, thoughts, log probabilities, and failures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from jaxctx.engine.interface import Caller
from jaxctx.errors import InvalidArgument, JaxctxError, ResourceExhausted, Unavailable
from jaxctx.types import FinishReason, GeneratePiece, GenerateRequest
from jaxctx_server.http.openai.responses.response_run import error_json
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import openai_client
from tests.server.http.scripted import ScriptedEngine, scripted_server

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
TIME: Any = {**WEATHER, "name": "get_time", "description": "Time of a place."}
CALL = ("<tool", '_call>{"name": "get_weather", "argu', 'ments": {"place": "Reykjavík"}}</tool_call>')
ASKED: Any = {"model": "fake", "input": "Weather?", "tools": [WEATHER]}
ECHO: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 6, "extra_body": {"ignore_eos": True}}


class TestTools:
    async def test_a_call_and_its_events(self) -> None:
        kinds: list[str] = []
        async with scripted_server("Let me look. ", *CALL) as scripted, openai_client(scripted.web) as api:
            response = await api.responses.create(**ASKED)
            async with api.responses.stream(**ASKED) as stream:
                async for event in stream:
                    kinds.append(event.type)
                streamed = await stream.get_final_response()
        for each in (response, streamed):
            text, call = each.output
            assert each.status == "completed"
            assert (text.type, call.type) == ("message", "function_call")
            assert each.output_text.strip() == "Let me look."
            assert call.type == "function_call"
            assert (call.name, json.loads(call.arguments)) == ("get_weather", {"place": "Reykjavík"})
            assert call.call_id != call.id
        assert "response.function_call_arguments.delta" in kinds
        assert kinds[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]

    async def test_channels_are_items(self) -> None:
        script = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commen",
            "tary<|message|>Let me look.<|end|><|start|>assistant to=functions.get_weather<|channel|>comm",
            'entary json<|message|>{"place": "Oslo"}',
        )
        server = scripted_server(*script, tool_calls="harmony", reasoning="harmony")
        async with server as scripted, openai_client(scripted.web) as api:
            response = await api.responses.create(**ASKED)
            async with api.responses.stream(**ASKED) as stream:
                async for _ in stream:
                    pass
                streamed = await stream.get_final_response()
        for each in (response, streamed):
            assert [item.type for item in each.output] == ["reasoning", "message", "function_call"]
            assert each.output_text == "Let me look."
            assert each.output[2].arguments == '{"place": "Oslo"}'  # type: ignore[union-attr]

    async def test_the_output_of_a_function_continues_a_response(self) -> None:
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            first = await api.responses.create(**ASKED)
            (call,) = first.output
            assert call.type == "function_call"
            scripted.engine.script = ("Rain.",)
            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            second = await api.responses.create(model="fake", input=[output], previous_response_id=first.id)
            assert second.output_text == "Rain."
            items = (await api.responses.input_items.list(second.id, order="asc")).data
            assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
            assert [tool.type for tool in second.tools] == ["function"]

    async def test_only_the_first_of_calls_that_must_not_be_parallel(self) -> None:
        async with scripted_server(*CALL, "\n", *CALL) as scripted, openai_client(scripted.web) as api:
            both = await api.responses.create(**ASKED)
            one = await api.responses.create(**ASKED, parallel_tool_calls=False)
        assert (len(both.output), len(one.output)) == (2, 1)
        assert not one.parallel_tool_calls

    @pytest.mark.parametrize(
        ("choice", "is_forced"),
        [
            ("auto", False),
            ("none", False),
            ("required", True),
            ({"type": "function", "name": "get_weather"}, True),
            ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}, True),
        ],
    )
    async def test_what_a_choice_asks_of_the_engine(self, choice: Any, is_forced: bool) -> None:
        fields: Any = {**ASKED, "tools": [WEATHER, TIME], "tool_choice": choice}
        async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
            response = await api.responses.create(**fields)
            (request,) = scripted.engine.requests
        assert (request.output_format is not None) == is_forced
        assert ("get_weather" in str(request.output_format)) == (is_forced and "allowed" not in str(choice))
        if choice == "none":
            assert response.output_text == "".join(CALL)

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"tools": [], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [], "tool_choice": {"type": "function", "name": "get_weather"}}, "tool_choice"),
            ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
            ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
            ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}}, "tool_choice.tools[0]"),
            (
                {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "none"}]}},
                "tool_choice.tools[0].name",
            ),
            ({"tool_choice": {"type": "allowed_tools", "mode": "never", "tools": []}}, "tool_choice.mode"),
        ],
    )
    async def test_a_choice_that_cannot_be_followed(self, fields: dict[str, Any], field: str) -> None:
        async with scripted_server(*CALL) as scripted:
            answer = await scripted.web("POST", "/v1/responses", {**ASKED, **fields})
            assert answer.error[0] == 400
            assert answer.error[2] == field
            assert scripted.engine.requests == []

    @pytest.mark.parametrize("choice", ["auto", "required"])
    async def test_a_call_before_a_text_that_has_a_format(self, choice: str) -> None:
        schema = {"type": "object", "properties": {"temperature": {"type": "integer"}}}
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        async with scripted_server(*CALL) as scripted:
            answer = await scripted.web("POST", "/v1/responses", {**ASKED, "tool_choice": choice, "text": text})
            assert [item["type"] for item in answer.json["output"]] == ["function_call"]
            (request,) = scripted.engine.requests
        assert request.output_format is not None
        assert ("temperature" in str(request.output_format.grammar)) == (choice == "auto")
        assert "get_weather" in str(request.output_format.grammar)


class TestThoughts:
    async def test_they_are_an_item_and_are_counted(self) -> None:
        async with (
            scripted_server("<think>Well", ", hm.</think>", "Rain.", reasoning="think") as scripted,
            openai_client(scripted.web) as api,
        ):
            response = await api.responses.create(model="fake", input="Weather?", reasoning={"effort": "high"})
            thoughts, text = response.output
            assert (thoughts.type, text.type) == ("reasoning", "message")
            assert thoughts.type == "reasoning"
            assert thoughts.content is not None
            assert thoughts.content[0].text.strip() == "Well, hm."
            assert response.output_text == "Rain."
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == 2
            assert response.reasoning is not None
            assert response.reasoning.effort == "high"
            again = await api.responses.create(model="fake", input=[*as_input(response), said("Sure?")])
            assert again.status == "completed"

    async def test_an_effort_that_is_none(self, web: HttpClient) -> None:
        body = {"model": "echo", "input": "x", "reasoning": {"effort": "immense"}}
        assert (await web("POST", "/v1/responses", body)).error == (400, "INVALID_FIELD", "reasoning.effort")


def as_input(response: Any) -> list[Any]:
    return [item.to_dict() for item in response.output]


def said(text: str) -> Any:
    return {"role": "user", "content": text}


INCLUDE: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


class TestLogprobs:
    async def test_each_token_has_one(self, api: openai.AsyncOpenAI) -> None:
        response = await api.responses.create(input="One", **INCLUDE, **ECHO)
        content: Any = response.output[0]
        logprobs = content.content[0].logprobs
        assert len(logprobs) == 6
        assert b"".join(bytes(each.bytes) for each in logprobs).decode(errors="replace") == response.output_text
        for each in logprobs:
            assert len(each.top_logprobs) == 2
            assert each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob
            assert each.logprob <= 0
        messages: Any = [said("One")]
        chat = await api.chat.completions.create(
            model="echo",
            messages=messages,
            temperature=0,
            max_tokens=6,
            logprobs=True,
            top_logprobs=2,
            extra_body={"ignore_eos": True},
        )
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert [each.token for each in logprobs] == [each.token for each in chat.choices[0].logprobs.content]
        assert [each.logprob for each in logprobs] == [each.logprob for each in chat.choices[0].logprobs.content]

    async def test_they_come_with_the_text(self, api: openai.AsyncOpenAI) -> None:
        told, final = [], None
        async with api.responses.stream(input="One", **INCLUDE, **ECHO) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    told += event.logprobs
                if event.type == "response.incomplete":
                    final = event.response
        assert final is not None
        content: Any = final.output[0]
        assert [each.token for each in told] == [each.token for each in content.content[0].logprobs]

    async def test_none_are_told_unasked(self, api: openai.AsyncOpenAI) -> None:
        content: Any = (await api.responses.create(input="One", **ECHO)).output[0]
        assert content.content[0].logprobs == []

    async def test_thoughts_have_none(self) -> None:
        async with (
            scripted_server("<think>Well</think>", "Rain.", reasoning="think") as scripted,
            openai_client(scripted.web) as api,
        ):
            response = await api.responses.create(model="fake", input="x", include=["message.output_text.logprobs"])
        content: Any = response.output[1]
        assert [each.logprob for each in content.content[0].logprobs] == [-2.0]

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"include": "all"}, "include"),
            ({"include": ["everything"]}, "include[0]"),
            ({"top_logprobs": 21}, "top_logprobs"),
            ({"text": {"verbosity": "endless"}}, "text.verbosity"),
        ],
    )
    async def test_what_is_refused(self, web: HttpClient, fields: dict[str, Any], field: str) -> None:
        answer = await web("POST", "/v1/responses", {"model": "echo", "input": "x", **fields})
        assert answer.error == (400, "INVALID_FIELD", field)


class BreakingEngine(ScriptedEngine):
    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        async for piece in super().generate(caller, request):
            yield piece
            raise Unavailable("the engine is lost", reason="ENGINE_LOST")


class TestFailures:
    async def test_a_stream_that_breaks_says_so(self) -> None:
        async with scripted_server("a", "b") as scripted:
            scripted.engine.__class__ = BreakingEngine
            answer = await scripted.web("POST", "/v1/responses", {"model": "fake", "input": "x", "stream": True})
            events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
            *_, failed, error = events
            assert answer.text.split("\n")[-4] == "event: error"
            assert (error["type"], error["code"], error["param"]) == ("error", "ENGINE_LOST", None)
            assert [each["sequence_number"] for each in events] == list(range(len(events)))
            assert failed["type"] == "response.failed"
            assert failed["response"]["status"] == "failed"
            assert failed["response"]["error"] == {"code": "server_error", "message": "the engine is lost"}
            assert error["error"]["code"] == "ENGINE_LOST"
            whole = await scripted.web("POST", "/v1/responses", {"model": "fake", "input": "x"})
            assert whole.error == (503, "ENGINE_LOST", None)
            assert scripted.engine.saved == {}

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ResourceExhausted("x", reason="QUOTA"), "rate_limit_exceeded"),
            (InvalidArgument.field("input", "x"), "invalid_prompt"),
            (Unavailable("x"), "server_error"),
        ],
    )
    def test_codes(self, error: JaxctxError, code: str) -> None:
        assert error_json(error)["code"] == code


async def test_an_output_that_was_cut(api: openai.AsyncOpenAI) -> None:
    async with (
        scripted_server("a", finish=FinishReason.LENGTH) as scripted,
        openai_client(scripted.web) as scripted_api,
    ):
        response = await scripted_api.responses.create(model="fake", input="x")
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    message: Any = response.output[0]
    assert message.status == "incomplete"
