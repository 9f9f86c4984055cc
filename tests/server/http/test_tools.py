"""Tools of all APIs: one form of them, read once, and errors that name the field of the request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.errors import InvalidArgument
from jaxctx.types import GeneratePiece, GenerateRequest
from jaxctx_server.chat_input import MAX_DEPTH
from jaxctx_server.http.anthropic.tools import read_tool as read_anthropic_tool
from jaxctx_server.http.openai.responses.request import read_tool as read_responses_tool
from jaxctx_server.http.tools import (
    MAX_TOOLS,
    make_tool,
    read_chat_tool,
    read_function,
    read_tools,
    stored_tools,
)
from tests.server.http.scripted import ScriptedEngine, scripted_server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
IN_CHAT = {"type": "function", "function": FUNCTION}
QUESTION = {"role": "user", "content": "?"}


def refused_field(value: Any, read: Any = read_function) -> str:
    with pytest.raises(InvalidArgument) as refused:
        read_tools("tools", value, read)
    return refused.value.violations[0].field


def test_every_api_says_the_same_tool() -> None:
    forms = [
        make_tool("t", IN_CHAT, read_chat_tool),
        make_tool("t", FUNCTION, read_function),
        make_tool("t", {"type": "function", **FUNCTION}, read_responses_tool),
        make_tool("t", {"name": "look", "description": "Looks.", "input_schema": SCHEMA}, read_anthropic_tool),
    ]
    assert [json.loads(each.text) for each in forms] == [each.chat_form for each in forms]
    assert [each.function for each in forms] == [FUNCTION] * 4
    assert (forms[0].name, forms[0].is_strict) == ("look", False)
    assert stored_tools([each.text for each in forms]) == forms


def test_a_tool_of_chat_goes_into_the_prompt_as_it_is() -> None:
    odd = {"function": {"strict": True, "x-mine": [1], "name": "look"}, "cache_control": {}, "type": "function"}
    tool = make_tool("t", odd, read_chat_tool)
    assert tool.text == json.dumps(odd, separators=(",", ":"))
    assert tool.is_strict


class RefusingEngine(ScriptedEngine):
    """Cannot follow the schema of CITY."""

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        assert request.output_format is not None
        if '"city"' in str(request.output_format.grammar):
            raise InvalidArgument.field("output_format.grammar", "cannot be followed")
        async for piece in super().generate(caller, request):
            yield piece


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        ("/v1/chat/completions", {"messages": [QUESTION], "tool_choice": "required"}, IN_CHAT),
        ("/v1/responses", {"input": "?", "tool_choice": "required"}, {"type": "function", **FUNCTION}),
        (
            "/v1/messages",
            {"messages": [QUESTION], "max_tokens": 9, "tool_choice": {"type": "any"}},
            {"name": "look", "input_schema": SCHEMA},
        ),
    ],
)
async def test_only_the_schema_of_a_strict_tool_refuses_a_request(
    path: str, body: Any, tool: Any, strict: bool
) -> None:
    if strict:
        tool = {**tool, "strict": True, "function": {**FUNCTION, "strict": True}}
    async with scripted_server('<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>') as scripted:
        scripted.engine.__class__ = RefusingEngine
        answer = await scripted.web("POST", path, {"model": "fake", "tools": [tool], **body})
    assert answer.status == (400 if strict else 200)
    if not strict:
        assert "look" in answer.text


def test_what_is_null_is_left_out() -> None:
    function = {"name": "look", "description": None, "parameters": None, "strict": None}
    in_chat = make_tool("t", {"type": "function", "function": function}, read_chat_tool)
    assert in_chat.function == {"name": "look"}
    assert make_tool("t", function, read_function).function == {
        "name": "look",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize(
    ("value", "read", "field"),
    [
        ({}, read_function, "tools"),
        ([FUNCTION] * (MAX_TOOLS + 1), read_function, "tools"),
        ([FUNCTION, "x"], read_function, "tools[1]"),
        ([{}], read_function, "tools[0].name"),
        ([{"name": 5}], read_function, "tools[0].name"),
        ([{"name": "a", "parameters": "x"}], read_function, "tools[0].parameters"),
        ([{"name": "a", "description": 5}], read_function, "tools[0].description"),
        ([{"type": "custom"}], read_chat_tool, "tools[0].type"),
        ([{"type": "function", "function": None}], read_chat_tool, "tools[0].function"),
        ([{"type": "function", "function": {"name": ""}}], read_chat_tool, "tools[0].function.name"),
        ([{"type": "mcp", **FUNCTION}], read_responses_tool, "tools[0].type"),
        ([{"type": "function", "name": ""}], read_responses_tool, "tools[0].name"),
        ([{"type": "bash_20250124", "name": "bash"}], read_anthropic_tool, "tools[0].type"),
        ([{"name": "a"}], read_anthropic_tool, "tools[0].input_schema"),
        ([{"name": "a", "input_schema": []}], read_anthropic_tool, "tools[0].input_schema"),
        ([{"name": "", "input_schema": {}}], read_anthropic_tool, "tools[0].name"),
    ],
)
def test_a_tool_that_is_refused(value: Any, read: Any, field: str) -> None:
    assert refused_field(value, read) == field


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_a_tool_that_is_too_deep(depth: int) -> None:
    parameters: Any = {}
    for _ in range(depth):
        parameters = {"a": parameters}
    assert refused_field([{"name": "a", "parameters": parameters}]) == "tools[0]"
