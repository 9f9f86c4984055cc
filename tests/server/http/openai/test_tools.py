"""Tools of a chat request: which stand in the prompt, and which may or must be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.chat_output import NO_TOOLS, ToolUse
from jaxctx_server.http.openai.tools import parse_tools


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TEXTS = [json.dumps(tool(name), separators=(",", ":")) for name in "ab"]


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(names)}}


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse(tools=TEXTS)),
        ("auto", ToolUse(tools=TEXTS)),
        ("required", ToolUse(tools=TEXTS, choice="required")),
        (named("b"), ToolUse(tools=TEXTS, choice="named", name="b")),
        (allowed("auto", named("b")), ToolUse(tools=TEXTS[1:])),
        (allowed("required", named("b"), named("b")), ToolUse(tools=TEXTS[1:], choice="required")),
    ],
)
def test_a_choice(choice: Any, use: ToolUse) -> None:
    fields: dict[str, Any] = {"tools": [tool("a"), tool("b")]}
    if choice is not None:
        fields["tool_choice"] = choice
    found = parse_tools(fields)
    assert (list(found.in_prompt), found.use) == (TEXTS, use)


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
