"""Tools of the Anthropic API, and those that are loaded later."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.anthropic.prompt import parse_prompt
from jaxctx_server.http.anthropic.request import parse_messages_request
from jaxctx_server.http.anthropic.tools import MAX_OFFERED_TOOLS, callable_tools, definitions, parse_tools
from jaxctx_server.http.tools import MAX_TOOLS
from tests.server.http.client import HttpClient
from tests.server.http.scripted import scripted_server

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "input_schema": SCHEMA, **fields}


TOOLS = [tool("search"), tool("weather", defer_loading=True), tool("time", defer_loading=True)]
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search", "input": {}}]}


def refer(*names: str) -> dict[str, Any]:
    """The result of a search of tools, which refers to these."""
    content = [{"type": "tool_reference", "tool_name": name} for name in names]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]}


def ask(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request with TOOLS."""
    question = {"role": "user", "content": "?"}
    return {"model": "fake", "max_tokens": 50, "tools": TOOLS, "messages": [question, *messages], **fields}


def in_prompt(body: dict[str, Any]) -> list[str]:
    prompt = parse_messages_request(json.dumps(body).encode()).prompt
    return [json.loads(text)["function"]["name"] for text in prompt.tools]


def test_a_tool_as_the_chat_template_reads_it() -> None:
    (parsed,) = parse_tools([tool("search", cache_control={"type": "ephemeral"}, defer_loading=None)])
    function = {"name": "search", "parameters": SCHEMA, "description": "Does search."}
    assert json.loads(parsed.tool.text) == {"type": "function", "function": function}
    assert not parsed.is_deferred


def test_a_deferred_tool_is_not_in_the_prompt_until_a_result_refers_to_it() -> None:
    assert in_prompt(ask()) == ["search"]
    parsed = parse_tools(TOOLS)
    assert [each.name for each in callable_tools(parsed, ask()["messages"])] == ["search"]
    messages = [{"role": "user", "content": "?"}, CALL, refer("time")]
    assert [each.name for each in callable_tools(parsed, messages)] == ["search", "time"]
    assert in_prompt(ask(CALL, refer("time"))) == ["search"]  # the prompt begins as it did
    result = parse_prompt(None, messages, definitions(parsed)).messages[-1]
    first, function, last = result.content.split("\n")
    assert (result.role, first, last) == ("tool", "<functions>", "</functions>")
    assert json.loads(function.removeprefix("<function>").removesuffix("</function>")) == {
        "name": "time",
        "description": "Does time.",
        "parameters": SCHEMA,
    }


def test_how_many_tools_there_may_be() -> None:
    """As many as a prompt may have count those that are in it."""
    first = [tool(f"now_{index}") for index in range(MAX_TOOLS)]
    later = [tool(f"later_{index}", defer_loading=True) for index in range(MAX_OFFERED_TOOLS - MAX_TOOLS)]
    assert len(parse_tools(first + later)) == MAX_OFFERED_TOOLS
    assert in_prompt(ask(tools=first + later)) == [each["name"] for each in first]
    for refused in (first + later + later[:1], [*first, tool("another")]):
        with pytest.raises(InvalidArgument) as raised:
            parse_tools(refused)
        assert [each.field for each in raised.value.violations] == ["tools"]


def test_text_around_references_keeps_its_place() -> None:
    message = refer("weather", "time")
    text = {"type": "text", "text": "a"}
    message["content"][0]["content"] = [text, *message["content"][0]["content"], text]
    (result,) = parse_prompt(None, [message], {"weather": "W", "time": "T"}).messages
    assert result.content == "a<functions>\n<function>W</function>\n<function>T</function>\n</functions>a"


def test_a_definition_is_written_once() -> None:
    """Later results only name the tool, so that a request of some kilobytes does not become a prompt of gigabytes."""
    messages = [refer("time", "time"), CALL, refer(*["time"] * 200)]
    first, _, last = parse_prompt(None, messages, {"time": "T" * 1000}).messages
    again = '<function>{"name":"time"}</function>\n'
    assert first.content == f"<functions>\n<function>{'T' * 1000}</function>\n{again}</functions>"
    assert last.content == f"<functions>\n{again * 200}</functions>"


async def test_a_loaded_tool_is_called() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
    async with scripted_server(call) as scripted:
        unloaded = await scripted.web("POST", "/v1/messages", ask())
        loaded = await scripted.web("POST", "/v1/messages", ask(CALL, refer("weather")))
    assert [block["type"] for block in unloaded.json["content"]] == ["text"]
    (block,) = loaded.json["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"place": "Oslo"})


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_most_if_the_request_says_so(stream: bool) -> None:
    """Also where the model may call tools or not, and no grammar holds it to one."""
    call = '<tool_call>{"name": "search", "arguments": {"place": "Oslo"}}</tool_call>'
    async with scripted_server(call, "\n" + call.replace("Oslo", "Rome")) as scripted:
        both = await scripted.web("POST", "/v1/messages", ask(stream=stream))
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = await scripted.web("POST", "/v1/messages", ask(stream=stream, tool_choice=choice))
    assert ["Oslo" in both.text, "Rome" in both.text] == [True, True]
    assert ["Oslo" in one.text, "Rome" in one.text] == [True, False]
    assert one.text.count('"type":"tool_use"') == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool("a")] * 129}, "tools"),
        ({"tools": [tool("a", defer_loading="yes")]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "tool_search_tool_regex_20251119", "name": "a"}]}, "tools[0].type"),
        ({"messages": [CALL, refer("search", "nobody")]}, "messages[1].content[0].content[1].tool_name"),
    ],
)
def test_the_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_messages_request(json.dumps(ask() | fields).encode())
    assert [each.field for each in raised.value.violations] == [named]


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_api(web: HttpClient) -> None:
    """Claude Code then shortens its history, and asks again."""
    message = {"role": "user", "content": "x" * 20_000}
    answer = await web("POST", "/v1/messages", {"model": "echo", "max_tokens": 1, "messages": [message]})
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
    assert "prompt is too long: " in error["message"]
