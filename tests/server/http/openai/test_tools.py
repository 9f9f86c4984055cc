"""Tools of a chat request: which stand in the prompt, and which may or must be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.chat_output import NO_TOOLS, ToolUse
from jaxctx_server.http.openai.tools import parse_tools
from jaxctx_server.http.tools import read_function, read_tools, stored_tools


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = stored_tools([json.dumps(tool(name), separators=(",", ":")) for name in "ab"])


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(names)}}


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse(tools=TOOLS)),
        ("auto", ToolUse(tools=TOOLS)),
        ("required", ToolUse(tools=TOOLS, choice="required")),
        (named("b"), ToolUse(tools=TOOLS, choice="named", name="b")),
        (allowed("auto", named("b")), ToolUse(tools=TOOLS[1:])),
        (allowed("required", named("b"), named("b")), ToolUse(tools=TOOLS[1:], choice="required")),
    ],
)
def test_a_choice(choice: Any, use: ToolUse) -> None:
    fields: dict[str, Any] = {"tools": [tool("a"), tool("b")]}
    if choice is not None:
        fields["tool_choice"] = choice
    found = parse_tools(fields)
    assert (list(found.in_prompt), found.use) == (TOOLS, use)


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": [tool("a")], "tool_choice": "none"}, {"tool_choice": "auto"}]
)
def test_no_tools(fields: dict[str, Any]) -> None:
    found = parse_tools(fields)
    assert (list(found.in_prompt), found.use) == ([], NO_TOOLS)


def test_one_call_at_a_time() -> None:
    assert not parse_tools({"tools": [tool("a")], "parallel_tool_calls": False}).use.parallel


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        (5, "tool_choice"),
        ("a", "tool_choice"),
        ({"type": "function"}, "tool_choice.function.name"),
        (named("c"), "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowed("named", named("a")), "tool_choice.allowed_tools.mode"),
        (allowed(["auto"], named("a")), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", 5), "tool_choice.allowed_tools.tools[0].function.name"),
        (allowed("auto", named("a"), named("c")), "tool_choice.allowed_tools.tools[1].function.name"),
    ],
)
def test_a_choice_that_is_refused(choice: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_tools({"tools": [tool("a")], "tool_choice": choice})
    assert refused.value.violations[0].field == field


def test_a_tool_that_is_too_deep() -> None:
    parameters: Any = {}
    for _ in range(100_000):
        parameters = {"a": parameters}
    described = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    with pytest.raises(InvalidArgument) as refused:
        parse_tools({"tools": [described]})
    assert refused.value.violations[0].field == "tools[0]"


def function(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object"}}


FUNCTIONS = read_tools("functions", [function("a"), function("b")], read_function)


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse(tools=FUNCTIONS, parallel=False)),
        ("auto", ToolUse(tools=FUNCTIONS, parallel=False)),
        ("none", NO_TOOLS),
        ({"name": "b"}, ToolUse(tools=FUNCTIONS, choice="named", name="b", parallel=False)),
    ],
)
def test_functions_are_tools(choice: Any, use: ToolUse) -> None:
    fields: dict[str, Any] = {"functions": [function("a"), function("b")], "tools": [], "tool_choice": ""}
    if choice is not None:
        fields["function_call"] = choice
    found = parse_tools(fields)
    assert (found.use, found.are_functions) == (use, True)
    assert list(found.in_prompt) == ([] if use is NO_TOOLS else FUNCTIONS)
    assert json.loads(FUNCTIONS[0].text) == tool("a")


def test_no_functions() -> None:
    for fields in ({"functions": []}, {"function_call": "none"}, {"function_call": "auto"}):
        assert parse_tools(fields).use == NO_TOOLS


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"functions": {}}, "functions"),
        ({"functions": [5]}, "functions[0]"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "a", "parameters": []}]}, "functions[0].parameters"),
        ({"functions": [function("a")] * 129}, "functions"),
        ({"functions": [function("a")], "function_call": {"name": "c"}}, "function_call.name"),
        ({"functions": [function("a")], "function_call": {}}, "function_call"),
        ({"functions": [function("a")], "function_call": "a"}, "function_call"),
        ({"function_call": {"name": "a"}}, "function_call"),
        ({"functions": [function("a")], "tools": [tool("a")]}, "tools"),
        ({"functions": [function("a")], "tool_choice": "auto"}, "tool_choice"),
    ],
)
def test_functions_that_are_refused(fields: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_tools(fields)
    assert refused.value.violations[0].field == field
