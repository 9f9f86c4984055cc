"""The official OpenAI client against a server process, over every path that it has for text: a black box.

What each answer means in detail is tested beside the code, in tests/server/http/openai.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

import jaxctx
from tests.e2e.server_processes import Server

pytestmark = pytest.mark.slow
USER: Any = [{"role": "user", "content": "Write a function."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}


class Weather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=8)
    days: int = pydantic.Field(ge=0, le=9)


@pytest.fixture
def api(long_model: Server) -> Iterator[openai.OpenAI]:
    url = f"{long_model.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield client
    with jaxctx.Client(long_model.address) as client:
        deadline = time.monotonic() + 10
        while list(client.contexts()):  # of a request that was given up
            assert time.monotonic() < deadline, "a context is left"
            time.sleep(0.05)


class TestCompletions:
    def test_streamed_and_not_are_one(self, api: openai.OpenAI) -> None:
        fields: Any = {"model": "long", "prompt": "def fib(n):", "max_tokens": 16, "temperature": 0}
        whole = api.completions.create(**fields)
        parts = list(api.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
        assert parts[-1].usage is not None
        assert whole.usage is not None
        assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_several_prompts_and_outputs(self, api: openai.OpenAI) -> None:
        made = api.completions.create(model="long", prompt=["def a", "def b"], n=2, max_tokens=4, seed=1)
        assert [choice.index for choice in made.choices] == [0, 1, 2, 3]

    def test_prompt_log_probabilities(self, api: openai.OpenAI) -> None:
        tokens = api.post("/../tokenize", body={"prompt": "def fib(n):"}, cast_to=object)["tokens"]  # type: ignore[index]
        made = api.completions.create(model="long", prompt=tokens, echo=True, logprobs=2, max_tokens=1, temperature=0)
        logprobs = made.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        assert len(logprobs.token_logprobs) == len(tokens) + 1

    def test_stop(self, api: openai.OpenAI) -> None:
        fields: Any = {"model": "long", "prompt": "def fib(n):", "max_tokens": 40, "temperature": 0}
        whole = api.completions.create(**fields).choices[0].text
        stop = whole[10:13]
        stopped = api.completions.create(**fields, stop=[stop]).choices[0]
        assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")


class TestChat:
    def test_log_probabilities(self, api: openai.OpenAI) -> None:
        made = api.chat.completions.create(
            model="long", messages=USER, max_completion_tokens=4, logprobs=True, top_logprobs=3, temperature=0
        )
        content = made.choices[0].logprobs
        assert content is not None
        assert content.content is not None
        assert [len(each.top_logprobs) for each in content.content] == [3] * len(content.content)
        for each in content.content:
            assert each.logprob == max(top.logprob for top in each.top_logprobs)

    def test_parsed_output(self, api: openai.OpenAI) -> None:
        made = api.chat.completions.parse(model="long", messages=USER, response_format=Weather, max_tokens=200)
        assert isinstance(made.choices[0].message.parsed, Weather)

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_tools(self, api: openai.OpenAI, choice: Any) -> None:
        fields: Any = {
            "model": "long",
            "messages": USER,
            "tools": [TOOL],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": 200,
        }
        message = api.chat.completions.create(**fields).choices[0].message
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert call.function.name == "weather"
        Weather.model_validate_json(call.function.arguments)
        with api.chat.completions.stream(**fields) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls is not None
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        history = [*USER, message.model_dump(exclude_none=True), result]
        assert api.chat.completions.create(model="long", messages=history, tools=[TOOL], max_tokens=4).choices

    def test_errors_have_their_classes(self, api: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model="long", messages=USER, top_p=5)
        assert refused.value.param == "top_p"
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="none", messages=USER)
        with pytest.raises(openai.NotFoundError):
            api.embeddings.create(model="long", input="x")

    def test_a_client_that_gives_up(self, api: openai.OpenAI) -> None:
        fields: Any = {"model": "long", "messages": USER, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.APITimeoutError):
            api.with_options(timeout=0.5).chat.completions.create(**fields)

    def test_a_stream_that_is_closed(self, api: openai.OpenAI) -> None:
        fields: Any = {"model": "long", "messages": USER, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
        with api.chat.completions.create(**fields, stream=True) as stream:
            assert next(iter(stream)).choices


class TestResponses:
    def test_it_is_continued_and_deleted(self, api: openai.OpenAI) -> None:
        first = api.responses.create(model="long", input="Write a function. " * 20, max_output_tokens=8)
        second = api.responses.create(model="long", input="More.", previous_response_id=first.id, max_output_tokens=8)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
        assert api.responses.retrieve(first.id).output_text == first.output_text
        for each in (first, second):
            api.responses.delete(each.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(first.id)

    def test_tools_and_schemas_streamed(self, api: openai.OpenAI) -> None:
        tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
        with api.responses.stream(
            model="long",
            input="x",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=300,
            store=False,
        ) as stream:
            final = stream.get_final_response()
        assert final.output[0].type == "function_call"
        parsed = api.responses.parse(model="long", input="x", text_format=Weather, max_output_tokens=200, store=False)
        assert isinstance(parsed.output_parsed, Weather)


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["long"]
    assert api.models.retrieve("long").object == "model"
