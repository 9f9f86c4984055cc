"""POST /v1/messages by the official client: answers, events, tools, thoughts, and what the cache did."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

import jaxctx
from jaxctx.model.text.json_schemas import written_tightly
from jaxctx.types import FinishReason
from jaxctx_server.auth import Key
from jaxctx_server.http.anthropic.request import parse_messages_request
from tests.server.http.anthropic.harness import anthropic_client
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left
from tests.server.http.scripted import scripted_server

STORY = "Tell a story of a page that is shared by many, and of one that is not. " * 3
GREEDY: Any = {"model": "echo", "max_tokens": 8, "extra_body": {"temperature": 0, "ignore_eos": True}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def test_an_answer(claude: anthropic.AsyncAnthropic, client: jaxctx.aio.Client) -> None:
    message = await claude.messages.create(system="Be brief.", messages=[user(STORY)], **GREEDY)
    assert (message.role, message.stop_reason, message.model) == ("assistant", "max_tokens", "echo")
    assert message.usage.output_tokens == 8
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
    async with await client.create(messages=messages, salt="alone") as context:
        expected = str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True))
    (block,) = message.content
    assert block.type == "text"
    assert block.text == expected


async def test_the_events_of_a_stream(claude: anthropic.AsyncAnthropic) -> None:
    kinds: list[str] = []
    async with claude.messages.stream(messages=[user(STORY)], **GREEDY) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    assert [kind for kind in kinds if kind not in ("text", "content_block_delta")] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    whole = await claude.messages.create(messages=[user(STORY)], **GREEDY)
    assert [block.text for block in final.content] == [block.text for block in whole.content]  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens == 8


async def test_what_the_cache_did(claude: anthropic.AsyncAnthropic) -> None:
    cached: Any = [{"type": "text", "text": STORY, "cache_control": {"type": "ephemeral"}}]
    first = (await claude.messages.create(system=cached, messages=[user("One")], **GREEDY)).usage
    second = (await claude.messages.create(system=STORY, messages=[user("Two")], **GREEDY)).usage
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens > 0
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens - 16
    for usage in (first, second):
        total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert total > len(STORY) / 2
    async with claude.messages.stream(system=STORY, messages=[user("Two")], **GREEDY) as stream:
        async for event in stream:
            if event.type == "message_start":  # it is known before the first word
                assert event.message.usage.cache_read_input_tokens > 0


async def test_a_prompt_is_computed_ahead(claude: anthropic.AsyncAnthropic) -> None:
    fields = GREEDY | {"max_tokens": 0}
    warmed = await claude.messages.create(messages=[user(STORY)], **fields)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    assert warmed.usage.cache_creation_input_tokens > 0
    answer = await claude.messages.create(messages=[user(STORY)], **GREEDY)
    assert answer.usage.cache_read_input_tokens > 0


async def test_the_line_of_a_bill_does_not_change_the_prompt(claude: anthropic.AsyncAnthropic) -> None:
    def system(number: int) -> Any:
        billing = f"x-anthropic-billing-header: cc_version=2.{number}; cch={number:05};"
        return [{"type": "text", "text": billing}, {"type": "text", "text": STORY}]

    first = await claude.messages.create(system=system(1), messages=[user("One")], **GREEDY)
    second = await claude.messages.create(system=system(2), messages=[user("One")], **GREEDY)
    assert second.content == first.content
    assert second.usage.cache_read_input_tokens > second.usage.input_tokens


async def test_an_answer_that_was_begun_is_continued(claude: anthropic.AsyncAnthropic) -> None:
    begun: Any = [user("One"), {"role": "assistant", "content": "The answer is"}]
    message = await claude.messages.create(messages=begun, **GREEDY)
    other = await claude.messages.create(messages=[user("One")], **GREEDY)
    assert message.content != other.content
    counted = await claude.messages.count_tokens(model="echo", messages=begun)
    usage = message.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == total


async def test_a_stop_sequence() -> None:
    async with scripted_server("a", "b") as scripted, anthropic_client(scripted.web) as claude:
        await claude.messages.create(model="fake", max_tokens=5, messages=[user("x")], stop_sequences=["END", "##"])
        assert scripted.engine.requests[0].stop == ("END", "##")


class TestTools:
    CALL = ("<tool", '_call>{"name": "get_weather", "argu', 'ments": {"place": "Re', 'ykjavík"}}</tool_call>')

    async def test_a_call(self) -> None:
        async with (
            scripted_server("Let me ", "look. ", *self.CALL) as scripted,
            anthropic_client(scripted.web) as claude,
        ):
            fields: Any = {"model": "fake", "max_tokens": 50, "messages": [user("Weather?")], "tools": [WEATHER]}
            message = await claude.messages.create(**fields)
            async with claude.messages.stream(**fields) as stream:
                streamed = await stream.get_final_message()
        assert message.stop_reason == streamed.stop_reason == "tool_use"
        for content in (message.content, streamed.content):
            text, call = content
            assert text.type == "text"
            assert text.text.strip() == "Let me look."
            assert call.type == "tool_use"
            assert (call.name, call.input) == ("get_weather", {"place": "Reykjavík"})
            assert call.id.startswith("toolu_")

    async def test_a_call_that_is_no_json_is_not_to_be_run(self) -> None:
        """The API has objects only: its arguments are lost, and the answer does not end for its sake."""
        broken = '<tool_call>{"name": "get_weather", "arguments": {"place": "Reykjavík", "only": old}}</tool_call>'
        async with scripted_server(broken) as scripted, anthropic_client(scripted.web) as claude:
            fields: Any = {"model": "fake", "max_tokens": 50, "messages": [user("Weather?")], "tools": [WEATHER]}
            message = await claude.messages.create(**fields)
        assert message.stop_reason == "end_turn"

    async def test_several_calls_and_their_results(self) -> None:
        async with (
            scripted_server(*self.CALL, "\n", *self.CALL) as scripted,
            anthropic_client(scripted.web) as claude,
        ):
            first = await claude.messages.create(
                model="fake", max_tokens=50, messages=[user("Weather?")], tools=[WEATHER]
            )
            calls: Any = first.content
            assert [call.type for call in calls] == ["tool_use", "tool_use"]
            assert calls[0].id != calls[1].id
            results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."} for call in calls]
            history: Any = [user("Weather?"), {"role": "assistant", "content": calls}, user("")]
            history[-1]["content"] = [*results, {"type": "text", "text": "So?"}]
            again = await claude.messages.create(model="fake", max_tokens=50, messages=history, tools=[WEATHER])
            assert again.stop_reason == "tool_use"

    @pytest.mark.parametrize(
        ("choice", "forced"),
        [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True)],
    )
    async def test_a_call_is_forced_by_a_grammar(self, choice: Any, forced: bool) -> None:
        async with scripted_server(*self.CALL) as scripted, anthropic_client(scripted.web) as claude:
            await claude.messages.create(
                model="fake", max_tokens=50, messages=[user("x")], tools=[WEATHER], tool_choice=choice
            )
            assert (scripted.engine.requests[0].output_format is not None) == forced

    async def test_no_call_is_allowed(self) -> None:
        async with scripted_server(*self.CALL) as scripted, anthropic_client(scripted.web) as claude:
            message = await claude.messages.create(
                model="fake", max_tokens=50, messages=[user("x")], tools=[WEATHER], tool_choice={"type": "none"}
            )
        assert message.stop_reason == "end_turn"
        assert [block.type for block in message.content] == ["text"]

    async def test_a_model_whose_calls_nobody_knows(self) -> None:
        async with scripted_server("x", tool_calls=None) as scripted:
            body = {"model": "fake", "max_tokens": 5, "messages": [user("x")], "tools": [WEATHER]}
            answer = await scripted.web("POST", "/v1/messages", body)
        assert (answer.status, answer.json["error"]["param"]) == (400, "tools")


async def test_thoughts() -> None:
    async with (
        scripted_server("<th", "ink>First, ", "this.</think>", "\n\nThat.", reasoning="think") as scripted,
        anthropic_client(scripted.web) as claude,
    ):
        message = await claude.messages.create(model="fake", max_tokens=50, messages=[user("x")])
        history: Any = [user("x"), {"role": "assistant", "content": message.content}, user("y")]
        again = await claude.messages.create(model="fake", max_tokens=50, messages=history)
    thoughts, text = message.content
    assert thoughts.type == "thinking"
    assert thoughts.thinking.strip() == "First, this."
    assert text.type == "text"
    assert text.text.strip() == "That."
    assert again.stop_reason == "end_turn"


async def test_thoughts_that_fill_the_answer() -> None:
    async with (
        scripted_server("<think>on and on", finish=FinishReason.LENGTH, reasoning="think") as scripted,
        anthropic_client(scripted.web) as claude,
    ):
        message = await claude.messages.create(model="fake", max_tokens=5, messages=[user("x")])
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["thinking"]


async def test_json_by_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with scripted_server('{"a": 1}') as scripted:
        body = {"model": "fake", "max_tokens": 5, "messages": [user("x")]}
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        assert (await scripted.web("POST", "/v1/messages", body)).status == 200
        output_format = scripted.engine.requests[0].output_format
    assert output_format is not None
    assert json.loads(output_format.json_schema) == written_tightly(schema)


@pytest.mark.parametrize("kind", ["auto", "any"])
async def test_a_call_before_json(kind: str) -> None:
    schema = {"type": "object", "properties": {"temperature": {"type": "integer"}}}
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'
    async with scripted_server(call) as scripted:
        body = {"model": "fake", "max_tokens": 5, "messages": [user("x")], "tools": [WEATHER]}
        body |= {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "tool_choice": {"type": kind}}
        answer = await scripted.web("POST", "/v1/messages", body)
        output_format = scripted.engine.requests[0].output_format
    assert [block["type"] for block in answer.json["content"]] == ["tool_use"]
    assert output_format is not None
    assert ("temperature" in str(output_format.grammar)) == (kind == "auto")
    assert "get_weather" in str(output_format.grammar)


async def test_json_of_a_model_whose_thoughts_the_template_begins() -> None:
    """A text with a format has it from its first character on."""
    async with scripted_server('{"a": 1}', reasoning="think_opened") as scripted:
        body = {"model": "fake", "max_tokens": 5, "messages": [user("x")]}
        body["output_config"] = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        answer = await scripted.web("POST", "/v1/messages", body)
    assert answer.json["content"] == [{"type": "text", "text": '{"a": 1}'}]


@pytest.mark.parametrize(
    ("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False), ("between_tools", False)]
)
def test_whether_to_think_is_a_variable_of_the_template(kind: str, thinks: bool) -> None:
    body = {"max_tokens": 4, "messages": [user("x")], "thinking": {"type": kind}}
    prompt = parse_messages_request(json.dumps(body).encode()).prompt
    assert json.loads(prompt.template_arguments) == {"enable_thinking": thinks}


async def test_edits_of_the_context_are_not_applied(web: HttpClient) -> None:
    """Coding agents ask for them in every request."""
    body = {"model": "echo", "max_tokens": 4, "messages": [user("x")]}
    body["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert (await web("POST", "/v1/messages", body)).json["context_management"] == {"applied_edits": []}
    del body["context_management"]
    assert "context_management" not in (await web("POST", "/v1/messages", body)).json


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"messages": []}, "messages"),
            ({"messages": "x"}, "messages"),
            ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
            (
                {
                    "messages": [
                        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 5}]}
                    ]
                },
                "messages[0].content[0].input",
            ),
            ({"system": 5}, "system"),
            ({"system": [{"type": "image"}]}, "system[0].type"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 10**9}, "max_tokens"),
            ({"temperature": -1}, "temperature"),
            ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
            ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
            ({"thinking": {"type": "perhaps"}}, "thinking.type"),
            ({"thinking": {"type": ["enabled"]}}, "thinking.type"),
            ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
            ({"diagnostics": 5}, "diagnostics"),
            ({"context_management": 5}, "context_management"),
            ({"context_management": {"edits": 5}}, "context_management.edits"),
            ({"context_management": {"edits": [{}]}}, "context_management.edits[0].type"),
        ],
    )
    async def test_the_field_is_named(
        self, web: HttpClient, client: jaxctx.aio.Client, fields: dict[str, Any], field: str
    ) -> None:
        body = {"model": "echo", "max_tokens": 5, "messages": [user("x")], **fields}
        answer = await web("POST", "/v1/messages", body)
        assert answer.status == 400
        assert set(answer.json) == {"type", "error"}
        error = answer.json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", field)
        await no_context_left(client)

    async def test_an_unknown_model(self, claude: anthropic.AsyncAnthropic) -> None:
        with pytest.raises(anthropic.NotFoundError) as raised:
            await claude.messages.create(**GREEDY | {"model": "none"}, messages=[user("x")])
        assert raised.value.request_id


class TestKeys:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_the_clients_own_header_carries_the_key(self, web: HttpClient) -> None:
        async with anthropic_client(web, "alice") as alice:
            first = await alice.messages.create(messages=[user(STORY)], **GREEDY)
        async with anthropic_client(web, "bob") as bob:
            other = await bob.messages.create(messages=[user(STORY)], **GREEDY)
            assert other.usage.cache_read_input_tokens == 0
            assert other.content == first.content
        async with anthropic_client(web, "nobody") as nobody:
            with pytest.raises(anthropic.AuthenticationError):
                await nobody.messages.create(messages=[user(STORY)], **GREEDY)


async def test_who_leaves_leaves_nothing_behind(claude: anthropic.AsyncAnthropic, client: jaxctx.aio.Client) -> None:
    fields = GREEDY | {"max_tokens": 1000}
    asking = asyncio.create_task(claude.messages.create(messages=[user(STORY)], **fields))
    await asyncio.sleep(0.1)
    asking.cancel()
    async with claude.messages.stream(messages=[user(STORY)], **fields) as stream:
        async for _ in stream:
            break
    await no_context_left(client)
