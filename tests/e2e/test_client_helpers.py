"""What the official clients do beyond requests, against a server process of a model that does what it is asked
(`tests.obedient`): answers as objects, streams that are put together, and loops that run tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.server_processes import Server

pytestmark = pytest.mark.slow
QUESTION = "What is the weather in Paris for 3 days?"
USER: Any = [{"role": "user", "content": QUESTION}]
RESULT = "sunny in Paris for 3 days"


class Forecast(BaseModel):
    """Tells the weather."""

    city: str
    days: int


PARIS = Forecast(city="Paris", days=3)
TOOL: Any = openai.pydantic_function_tool(Forecast)
RESPONSES_TOOL: Any = {"type": "function", **TOOL["function"]}


@anthropic.beta_tool
def weather(city: str, days: int) -> str:
    """Tells the weather.

    Args:
        city: Where.
        days: For how long.
    """
    return f"sunny in {city} for {days} days"


@pytest.fixture
def api(obedient: Server) -> Iterator[openai.OpenAI]:
    url = f"{obedient.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def claude(obedient: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=obedient.http_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


class TestChat:
    def test_a_text_as_an_object(self, api: openai.OpenAI) -> None:
        """The prompt says nothing of the schema, so that the model knows of the city only that it is a text."""
        found = api.chat.completions.parse(model="obedient", messages=USER, response_format=Forecast)
        parsed = found.choices[0].message.parsed
        assert parsed is not None
        assert parsed.days == 3
        assert parsed.city

    def test_arguments_as_an_object(self, api: openai.OpenAI) -> None:
        """The tool is strict, and comes before a text that has a format too."""
        for fields in ({}, {"response_format": Forecast}):
            found = api.chat.completions.parse(model="obedient", messages=USER, tools=[TOOL], **fields)
            (call,) = found.choices[0].message.tool_calls or ()
            assert call.function.parsed_arguments == PARIS

    def test_a_stream(self, api: openai.OpenAI) -> None:
        usage: Any = {"include_usage": True}
        fields: Any = {"model": "obedient", "messages": USER, "tools": [TOOL], "stream_options": usage}
        with api.chat.completions.stream(**fields) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        (call,) = final.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == PARIS
        assert final.usage is not None
        assert final.usage.completion_tokens > 0
        with api.chat.completions.stream(model="obedient", messages=USER, response_format=Forecast) as stream:
            kinds = {event.type for event in stream}
            parsed = stream.get_final_completion().choices[0].message.parsed
        assert {"content.delta", "content.done"} <= kinds
        assert parsed is not None
        assert parsed.days == 3

    def test_a_tool_that_a_grammar_chooses(self, api: openai.OpenAI) -> None:
        """The prompt does not say which tool is demanded."""
        other: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
        choice: Any = {"type": "function", "function": {"name": "Forecast"}}
        found = api.chat.completions.create(
            model="obedient", messages=USER, tools=[other, TOOL], tool_choice=choice
        ).choices[0]
        assert found.finish_reason == "tool_calls"
        assert [call.function.name for call in found.message.tool_calls or ()] == ["Forecast"]  # type: ignore[union-attr]

    def test_calls_of_two_tools(self, api: openai.OpenAI) -> None:
        other: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
        question: Any = [{"role": "user", "content": "Use Forecast, and other, for 'Paris' and 3."}]
        tools = [TOOL, other]
        calls = api.chat.completions.create(model="obedient", messages=question, tools=tools).choices[0].message
        assert [call.function.name for call in calls.tool_calls or ()] == ["Forecast", "other"]  # type: ignore[union-attr]
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {place}"}
            for place, call in enumerate(calls.tool_calls or ())
        ]
        history = [*question, calls, *results]
        answer = api.chat.completions.create(model="obedient", messages=history, tools=tools).choices[0].message
        assert answer.content == "The result is: result 0; result 1"


class TestResponses:
    def test_a_text_as_an_object(self, api: openai.OpenAI) -> None:
        parsed = api.responses.parse(model="obedient", input=QUESTION, text_format=Forecast).output_parsed
        assert parsed is not None
        assert parsed.days == 3

    def test_arguments_as_an_object(self, api: openai.OpenAI) -> None:
        for fields in ({}, {"text_format": Forecast}, {"text_format": Forecast, "tool_choice": "required"}):
            tools = [RESPONSES_TOOL]
            found: Any = api.responses.parse(model="obedient", input=QUESTION, tools=tools, **fields)  # type: ignore[arg-type]
            (call,) = found.output
            assert call.type == "function_call"
            assert call.parsed_arguments == PARIS.model_dump()

    def test_a_stream(self, api: openai.OpenAI) -> None:
        with api.responses.stream(model="obedient", input=QUESTION, text_format=Forecast) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert final.output_text == text
        assert final.output_parsed is not None
        assert final.output_parsed.days == 3


class TestMessages:
    @pytest.mark.parametrize("is_streamed", [False, True])
    def test_a_loop_that_runs_tools(self, claude: anthropic.Anthropic, is_streamed: bool) -> None:
        fields: Any = {"model": "obedient", "max_tokens": 300, "tools": [weather], "messages": USER}
        answers = []
        for answer in claude.beta.messages.tool_runner(**fields, stream=is_streamed):
            answers.append(answer.get_final_message() if is_streamed else answer)
        assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
        assert answers[0].content[-1].input == PARIS.model_dump()
        assert answers[1].content[0].text == f"The result is: {RESULT}"

    def test_a_text_as_an_object(self, claude: anthropic.Anthropic) -> None:
        fields: Any = {"model": "obedient", "max_tokens": 300, "messages": USER, "output_format": Forecast}
        found = [claude.messages.parse(**fields).parsed_output, claude.beta.messages.parse(**fields).parsed_output]
        with claude.beta.messages.stream(**fields) as stream:
            found.append(stream.get_final_message().parsed_output)
        assert [each.days for each in found] == [3, 3, 3]
