"""Tools of a request.

A tool with `defer_loading` is no part of the prompt's beginning. It can be called once the result of another tool, a
search of tools that the client runs, refers to it: its definition stands there. So the prompt only ever grows, and all
of it that was computed before is reused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.anthropic.prompt import is_tool_reference, text_field
from jaxctx_server.http.errors import json_text

Json = dict[str, Any]
MAX_TOOLS = 128


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a request."""

    function: Json  # name, description and parameters
    is_deferred: bool

    @property
    def name(self) -> str:
        """Its name."""
        name: str = self.function["name"]
        return name

    @property
    def text(self) -> str:
        """JSON, as the chat template reads it."""
        return json_text({"type": "function", "function": self.function})


def parse_tools(tools: object) -> list[Tool]:
    """The tools of a request. Raises InvalidArgument naming the field."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidArgument.field("tools", f"must be a list of up to {MAX_TOOLS} tools")
    return [parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def parse_tool(tool: object, field: str) -> Tool:
    """One tool. Raises InvalidArgument naming the field."""
    if not isinstance(tool, dict):
        raise InvalidArgument.field(field, "must be an object")
    if tool.get("type") not in (None, "custom"):
        raise InvalidArgument.field(f"{field}.type", "must be custom: this server runs no tools itself")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidArgument.field(f"{field}.input_schema", "must be a JSON schema")
    deferred = tool.get("defer_loading")
    if deferred is not None and not isinstance(deferred, bool):
        raise InvalidArgument.field(f"{field}.defer_loading", "must be true or false")
    function: Json = {"name": text_field(tool, "name", field), "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return Tool(function, deferred is True)


def definitions(tools: Sequence[Tool]) -> dict[str, str]:
    """JSON texts of the functions by their names, for results that refer to them."""
    return {tool.name: json_text(tool.function) for tool in tools}


def callable_tools(tools: Sequence[Tool], messages: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The tools that can be called after these messages, which were parsed: all but those that nothing has loaded."""
    loaded = loaded_names(messages) if any(tool.is_deferred for tool in tools) else set()
    return [tool for tool in tools if not tool.is_deferred or tool.name in loaded]


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
