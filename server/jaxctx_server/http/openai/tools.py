"""Tools of a chat request, and what it says of calling them.

| tool_choice | meaning |
|---|---|
| "auto", or none with tools | the model decides |
| "none" | no call; the prompt has no tools |
| "required" | at least one call |
| {"type": "function", "function": {"name": ...}} | a call of this tool |
| {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}} | only some of the tools; all stand in the prompt |
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.chat_input import parse_tool
from jaxctx_server.http.chat_output import NO_TOOLS, ToolUse
from jaxctx_server.http.errors import json_text

Json = Mapping[str, Any]
MAX_TOOLS = 128
ALLOWED_MODES = ("auto", "required")


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a request."""

    in_prompt: Sequence[str]  # JSON texts, as the chat template reads them
    use: ToolUse


def parse_tools(fields: Json) -> ChatTools:
    """The tools of a request. Raises InvalidArgument, naming the field."""
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise InvalidArgument.field("tools", "must be a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument.field("tools", f"must have up to {MAX_TOOLS} entries, not {len(tools)}")
    texts = [tool_text(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    parallel = fields.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise InvalidArgument.field("parallel_tool_calls", "must be true or false")
    return parse_tool_choice(fields.get("tool_choice", "auto"), texts, parallel)


def tool_text(path: str, tool: object) -> str:
    """A tool as a JSON text. Raises InvalidArgument if it is no function with a name."""
    if not isinstance(tool, dict):
        raise InvalidArgument.field(path, "must be an object")
    try:
        text = json_text(tool)
    except RecursionError as error:
        raise InvalidArgument.field(path, "has too many objects and lists inside each other") from error
    parse_tool(path, text)
    return text


def parse_tool_choice(choice: object, tools: Sequence[str], parallel: bool) -> ChatTools:
    """What a request says of calling its tools."""
    if choice == "none" or (choice == "auto" and not tools):
        return ChatTools((), NO_TOOLS)
    if choice == "auto":
        return ChatTools(tools, ToolUse(tools=tools, parallel=parallel))
    if not tools:
        raise InvalidArgument.field("tool_choice", "needs tools")
    if choice == "required":
        return ChatTools(tools, ToolUse(tools=tools, choice="required", parallel=parallel))
    if not isinstance(choice, dict):
        raise InvalidArgument.field("tool_choice", "must be auto, none, required, or an object")
    if choice.get("type") == "allowed_tools":
        return allowed_tools(choice.get("allowed_tools"), tools, parallel)
    if choice.get("type") != "function":
        raise InvalidArgument.field("tool_choice.type", "must be function or allowed_tools")
    name = name_in("tool_choice", choice)
    if name not in map(tool_name, tools):
        raise InvalidArgument.field("tool_choice.function.name", "names no tool of the request")
    return ChatTools(tools, ToolUse(tools=tools, choice="named", name=name, parallel=parallel))


def allowed_tools(allowed: object, tools: Sequence[str], parallel: bool) -> ChatTools:
    """Only some of the tools may be called."""
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        raise InvalidArgument.field(path, "must be an object")
    mode, chosen = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ALLOWED_MODES:
        raise InvalidArgument.field(f"{path}.mode", "must be auto or required")
    if not isinstance(chosen, list) or not 1 <= len(chosen) <= MAX_TOOLS:
        raise InvalidArgument.field(f"{path}.tools", f"must be a list of 1 to {MAX_TOOLS} tools")
    names = [name_in(f"{path}.tools[{place}]", each) for place, each in enumerate(chosen)]
    by_name = {tool_name(tool): tool for tool in tools}
    for place, name in enumerate(names):
        if name not in by_name:
            raise InvalidArgument.field(f"{path}.tools[{place}].function.name", "names no tool of the request")
    callable_tools = [by_name[name] for name in dict.fromkeys(names)]
    return ChatTools(tools, ToolUse(tools=callable_tools, choice=mode, parallel=parallel))


def name_in(path: str, value: object) -> str:
    """The name in {"type": "function", "function": {"name": ...}}."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidArgument.field(f"{path}.function.name", "must be text, not empty")
    return name


def tool_name(tool: str) -> str:
    """The name of a tool that was parsed."""
    name: str = json.loads(tool)["function"]["name"]
    return name
