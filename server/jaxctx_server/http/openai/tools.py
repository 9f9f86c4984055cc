"""Tools of a chat request, and what it says of calling them.

| tool_choice | meaning |
|---|---|
| "auto", or none with tools | the model decides |
| "none" | no call; the prompt has no tools |
| "required" | at least one call |
| {"type": "function", "function": {"name": ...}} | a call of this tool |
| {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}} | only some of the tools; all stand in the prompt |

The older `functions` are the same tools, and `function_call` says "auto", "none" or {"name": ...}; an answer then has
one call at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.chat_output import NO_TOOLS, ToolUse
from jaxctx_server.http.tools import MAX_TOOLS, Tool, read_chat_tool, read_function, read_tools

Json = Mapping[str, Any]
ALLOWED_MODES = ("auto", "required")
OLDER_NAMES = {"tools": "functions", "tool_choice": "function_call"}
"""Names of fields in a request with `functions`, by those of today."""


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a request."""

    in_prompt: Sequence[Tool]
    use: ToolUse
    are_functions: bool = False  # the request has the older fields, and so has the answer


def parse_tools(fields: Json) -> ChatTools:
    """The tools of a request. Raises InvalidArgument, naming the field."""
    if "functions" in fields or "function_call" in fields:
        return parse_functions(fields)
    tools = read_tools("tools", fields.get("tools", []), read_chat_tool)
    parallel = fields.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise InvalidArgument.field("parallel_tool_calls", "must be true or false")
    return parse_tool_choice(fields.get("tool_choice", "auto"), tools, parallel)


def parse_functions(fields: Json) -> ChatTools:
    """The tools of a request with the older fields. Raises InvalidArgument, naming the field."""
    for name, older_name in OLDER_NAMES.items():
        if fields.get(name):
            raise InvalidArgument.field(name, f"must not be together with {older_name}")
    functions = read_tools("functions", fields.get("functions", []), read_function)
    wanted = fields.get("function_call", "auto")
    if wanted == "none" or (wanted == "auto" and not functions):
        return ChatTools((), NO_TOOLS, are_functions=True)
    if not functions:
        raise InvalidArgument.field("function_call", "needs functions")
    if wanted == "auto":
        return ChatTools(functions, ToolUse(tools=functions, parallel=False), are_functions=True)
    if not isinstance(wanted, dict) or not isinstance(wanted.get("name"), str):
        raise InvalidArgument.field("function_call", "must be auto, none, or an object with a name")
    name = wanted["name"]
    if name not in [function.name for function in functions]:
        raise InvalidArgument.field("function_call.name", "names no function of the request")
    return ChatTools(functions, ToolUse(tools=functions, choice="named", name=name, parallel=False), are_functions=True)


def parse_tool_choice(choice: object, tools: Sequence[Tool], parallel: bool) -> ChatTools:
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
    if name not in [tool.name for tool in tools]:
        raise InvalidArgument.field("tool_choice.function.name", "names no tool of the request")
    return ChatTools(tools, ToolUse(tools=tools, choice="named", name=name, parallel=parallel))


def allowed_tools(allowed: object, tools: Sequence[Tool], parallel: bool) -> ChatTools:
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
    by_name = {tool.name: tool for tool in tools}
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
