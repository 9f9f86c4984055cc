"""Tools of a request.

A tool with `defer_loading` is no part of the prompt's beginning. It can be called once the result of another tool, a
search of tools that the client runs, refers to it: its definition stands there. So the prompt only ever grows, and all
of it that was computed before is reused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.anthropic.prompt import is_tool_reference
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.tools import MAX_TOOLS, Tool, read_function, read_tools

Json = dict[str, Any]
MAX_OFFERED_TOOLS = 2048  # of a request, those that are loaded later included


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of a request."""

    tool: Tool
    is_deferred: bool


def parse_tools(value: object) -> list[OfferedTool]:
    """The tools of a request. Raises InvalidArgument naming the field."""
    tools = read_tools("tools", value, read_tool, MAX_OFFERED_TOOLS)
    assert isinstance(value, list)  # or it could not be read
    deferred = [is_deferred(f"tools[{index}]", tool) for index, tool in enumerate(value)]
    in_prompt = deferred.count(False)
    if in_prompt > MAX_TOOLS:
        raise InvalidArgument.field("tools", f"must have up to {MAX_TOOLS} without defer_loading, not {in_prompt}")
    return [OfferedTool(tool, waits) for tool, waits in zip(tools, deferred, strict=True)]


def read_tool(field: str, tool: Any) -> Json:
    """One tool, in the form of chat. Raises InvalidArgument naming the field."""
    if tool.get("type") not in (None, "custom"):
        raise InvalidArgument.field(f"{field}.type", "must be custom: this server runs no tools itself")
    if tool.get("input_schema") is None:
        raise InvalidArgument.field(f"{field}.input_schema", "must be a JSON schema")
    return read_function(field, tool, "input_schema")


def is_deferred(field: str, tool: Any) -> bool:
    """Whether a tool is left out of the prompt until a result refers to it. Raises InvalidArgument."""
    deferred = tool.get("defer_loading")
    if deferred is not None and not isinstance(deferred, bool):
        raise InvalidArgument.field(f"{field}.defer_loading", "must be true or false")
    return deferred is True


def definitions(tools: Sequence[OfferedTool]) -> dict[str, str]:
    """JSON texts of the functions by their names, for results that refer to them."""
    return {each.tool.name: json_text(each.tool.function) for each in tools}


def callable_tools(tools: Sequence[OfferedTool], messages: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The tools that can be called after these messages, which were parsed: all but those that nothing has loaded."""
    loaded = loaded_names(messages) if any(each.is_deferred for each in tools) else set()
    return [each.tool for each in tools if not each.is_deferred or each.tool.name in loaded]


def loaded_names(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the tools to which results in these messages refer."""
    names: set[str] = set()
    for message in messages:
        blocks = message["content"] if isinstance(message["content"], list) else []
        for result in (block for block in blocks if block["type"] == "tool_result"):
            content = result.get("content")
            parts = content if isinstance(content, list) else []
            names.update(part["tool_name"] for part in parts if is_tool_reference(part))
    return names
