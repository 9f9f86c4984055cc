"""Frameworks for agents against a server process of a model that does what it is asked (`tests.obedient`): OpenAI's
Agents SDK and Pydantic AI, by chat completions and by responses.

    .venv/bin/pip install -e '.[clients]'
    .venv/bin/python -m pytest -n0 -m clients tests/e2e/test_agent_frameworks.py
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.server_processes import Server

pytestmark = pytest.mark.clients
QUESTION = "What is the weather in Paris for 3 days?"
RESULT = "sunny in Paris for 3 days"
ANSWER = f"The result is: {RESULT}"


def weather(city: str, days: int) -> str:
    """Tells the weather."""
    return f"sunny in {city} for {days} days"


class Forecast(BaseModel):
    city: str
    days: int


@pytest.fixture
async def client(obedient: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{obedient.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


class TestAgentsSDK:
    agents = pytest.importorskip("agents")

    @pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
    def model(self, client: openai.AsyncOpenAI, request: pytest.FixtureRequest) -> Any:
        self.agents.set_tracing_disabled(True)
        return getattr(self.agents, request.param)(model="obedient", openai_client=client)

    def agent(self, model: Any, **fields: Any) -> Any:
        return self.agents.Agent(name="A", instructions="Be brief.", model=model, **fields)

    async def run(self, agent: Any, question: Any = QUESTION, **fields: Any) -> Any:
        return await self.agents.Runner.run(agent, question, **fields)

    async def test_a_loop_and_another_question(self, model: Any) -> None:
        agent = self.agent(model, tools=[self.agents.function_tool(weather)])
        first = await self.run(agent)
        assert first.final_output == ANSWER
        history = [*first.to_input_list(), {"role": "user", "content": "And in Rome for 2?"}]
        assert (await self.run(agent, history)).final_output == "The result is: sunny in Rome for 2 days"

    async def test_a_loop_that_is_streamed(self, model: Any) -> None:
        agent = self.agent(model, tools=[self.agents.function_tool(weather)])
        streamed = self.agents.Runner.run_streamed(agent, QUESTION)
        deltas = ""
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                deltas += event.data.delta
        assert deltas == streamed.final_output == ANSWER

    async def test_tools_before_an_answer_with_a_schema(self, model: Any) -> None:
        agent = self.agent(model, tools=[self.agents.function_tool(weather)], output_type=Forecast)
        result = await self.run(agent)
        assert result.final_output == Forecast(city="Paris", days=3)
        assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [RESULT]

    async def test_another_agent_takes_over(self, model: Any) -> None:
        other = self.agents.Agent(name="Other", model=model)
        result = await self.run(self.agent(model, handoffs=[other]))
        assert result.last_agent is other
        assert "Other" in result.final_output

    async def test_a_demanded_call(self, model: Any) -> None:
        settings = self.agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=300)
        agent = self.agent(model, tools=[self.agents.function_tool(weather)], model_settings=settings)
        assert (await self.run(agent)).final_output == ANSWER

    @pytest.mark.parametrize("kept_by", ["response", "conversation"])
    async def test_the_server_keeps_the_conversation(self, client: openai.AsyncOpenAI, kept_by: str) -> None:
        model = self.agents.OpenAIResponsesModel(model="obedient", openai_client=client)
        agent = self.agent(model, tools=[self.agents.function_tool(weather)])
        if kept_by == "response":
            first = await self.run(agent, auto_previous_response_id=True)
            kept = {"previous_response_id": first.last_response_id}
        else:
            kept = {"conversation_id": (await client.conversations.create()).id}
            first = await self.run(agent, **kept)
        assert first.final_output == ANSWER
        second = await self.run(agent, "And in Rome for 2?", **kept)
        assert second.final_output == "The result is: sunny in Rome for 2 days"
        assert second.context_wrapper.usage.input_tokens_details.cached_tokens > 0


class TestPydanticAI:
    pydantic_ai = pytest.importorskip("pydantic_ai")

    @pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
    def model(self, client: openai.AsyncOpenAI, request: pytest.FixtureRequest) -> Any:
        models = pytest.importorskip("pydantic_ai.models.openai")
        providers = pytest.importorskip("pydantic_ai.providers.openai")
        return getattr(models, request.param)("obedient", provider=providers.OpenAIProvider(openai_client=client))

    async def test_a_loop_and_another_question(self, model: Any) -> None:
        agent = self.pydantic_ai.Agent(model, tools=[weather])
        first = await agent.run(QUESTION)
        assert first.output == ANSWER
        second = await agent.run("And in Rome for 2?", message_history=first.all_messages())
        assert second.output == "The result is: sunny in Rome for 2 days"

    @pytest.mark.parametrize("way", ["ToolOutput", "NativeOutput", "PromptedOutput"])
    async def test_an_answer_with_a_schema(self, model: Any, way: str) -> None:
        """By a tool, by the format of the response, or by the prompt and any JSON."""
        agent = self.pydantic_ai.Agent(model, output_type=getattr(self.pydantic_ai, way)(Forecast))
        assert (await agent.run(QUESTION)).output == Forecast(city="Paris", days=3)

    @pytest.mark.parametrize("way", ["ToolOutput", "NativeOutput"])
    async def test_tools_before_an_answer_with_a_schema(self, model: Any, way: str) -> None:
        called = []

        def look(city: str, days: int) -> str:
            """Tells the weather."""
            called.append((city, days))
            return RESULT

        agent = self.pydantic_ai.Agent(model, output_type=getattr(self.pydantic_ai, way)(Forecast), tools=[look])
        assert (await agent.run(QUESTION)).output == Forecast(city="Paris", days=3)
        assert called == [("Paris", 3)]

    async def test_streams(self, model: Any) -> None:
        async with self.pydantic_ai.Agent(model, tools=[weather]).run_stream(QUESTION) as streamed:
            deltas = [delta async for delta in streamed.stream_text(delta=True, debounce_by=None)]
        assert len(deltas) > 1
        assert "".join(deltas) == ANSWER
        async with self.pydantic_ai.Agent(model, output_type=Forecast).run_stream(QUESTION) as streamed:
            outputs = [output async for output in streamed.stream_output(debounce_by=None)]
        assert outputs[-1] == Forecast(city="Paris", days=3)
