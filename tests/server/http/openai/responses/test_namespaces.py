"""Functions in namespaces: how the model reads them, and how calls of them are told and kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.openai.responses.items import chat_messages, parse_items
from jaxctx_server.http.openai.responses.namespaces import called_function, response_tools
from jaxctx_server.http.openai.responses.request import parse_tools
from jaxctx_server.http.tools import stored_tools
from tests.server.http.openai.harness import openai_client
from tests.server.http.scripted import scripted_server


def function(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"target": {"type": "string"}}}
    return {"type": "function", "name": name, "description": "d", "parameters": parameters, "strict": False}


AGENTS: dict[str, Any] = {"type": "namespace", "name": "agents", "description": "Sub-agents."}
TOOLS: Any = [function("spawn"), {**AGENTS, "tools": [function("spawn"), function("close")]}, function("a.b")]
CALL = ("<tool", '_call>{"name": "agents.close", "argu', 'ments": {"target": "x"}}</tool_call>')


def test_the_model_reads_full_names() -> None:
    parsed = [json.loads(text) for text in parse_tools(TOOLS)]
    assert [tool["function"]["name"] for tool in parsed] == ["spawn", "agents.spawn", "agents.close", "a.b"]
    assert parsed[1]["namespace"] == {"name": "agents", "description": "Sub-agents."}
    assert {tool["type"] for tool in parsed} == {"function"}


def test_they_are_told_as_they_were_sent() -> None:
    assert response_tools(parse_tools(TOOLS)) == TOOLS


def test_the_function_that_is_called() -> None:
    """A name with a dot is that of a namespace only if the request has one."""
    tools = stored_tools(parse_tools(TOOLS))
    called = [called_function(tools, name) for name in ("spawn", "agents.spawn", "a.b", "no.such")]
    assert called == [(None, "spawn"), ("agents", "spawn"), (None, "a.b"), (None, "no.such")]


async def test_a_call_its_events_and_its_output() -> None:
    asked: Any = {"model": "fake", "input": "Close it.", "tools": TOOLS}
    async with scripted_server(*CALL) as scripted, openai_client(scripted.web) as api:
        response = await api.responses.create(**asked)
        async with api.responses.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        for each in (response, streamed):
            (call,) = each.output
            assert call.type == "function_call"
            assert (call.namespace, call.name, json.loads(call.arguments)) == ("agents", "close", {"target": "x"})
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        stored = await api.responses.create(model="fake", previous_response_id=response.id, input=[result])
        assert stored.tools[1].type == "namespace"
        assert stored.output[0].type == "function_call"
        assert stored.output[0].namespace == "agents"


def test_an_earlier_call_is_written_with_its_full_name() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "close", "arguments": "{}"}
    items = parse_items([call | {"namespace": "agents"}, call, call | {"namespace": None}], "input")
    (answer,) = chat_messages(items)
    assert [each.name for each in answer.tool_calls] == ["agents.close", "close", "close"]


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({**AGENTS, "name": ""}, "tools[0].name"),
        ({**AGENTS, "description": 1}, "tools[0].description"),
        (AGENTS, "tools[0].tools"),
        ({**AGENTS, "tools": [function("a"), {"type": "custom", "name": "b"}]}, "tools[0].tools[1].type"),
        ({**AGENTS, "tools": [{**AGENTS, "tools": []}]}, "tools[0].tools[0].type"),
        ({**AGENTS, "tools": [function("")]}, "tools[0].tools[0].name"),
        ({**AGENTS, "tools": [function("a")] * 129}, "tools"),
    ],
)
def test_the_field_is_named(tool: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_tools([tool])
    assert [each.field for each in raised.value.violations] == [field]


def test_the_namespace_of_a_call_must_be_a_text() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "close", "arguments": "{}", "namespace": 1}
    with pytest.raises(InvalidArgument) as raised:
        parse_items([call], "input")
    assert raised.value.violations[0].field == "input[0].namespace"
