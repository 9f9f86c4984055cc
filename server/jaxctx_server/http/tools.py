"""Tools of a request, for every API that has them: read once, then used by the prompt, the grammar and the parsers.

    chat         {"type": "function", "function": {"name", "description", "parameters", "strict"}}
    functions    {"name", "description", "parameters", "strict"}: Responses, and the older `functions` of chat
    Anthropic    {"name", "description", "input_schema"}

Errors name the field as the API has it. What the tools of a chat template must be is said in `chat_input`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.chat_input import NotJson, check_depth, check_tool
from jaxctx_server.http.errors import json_text

Json = dict[str, Any]
ReadTool = Callable[[str, object], Json]  # of a field and its value: the tool in the form of chat
MAX_TOOLS = 128  # of a prompt: as many as the contract has


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    text: str  # JSON, in the form of chat
    function: Json  # what that says of it

    @property
    def name(self) -> str:
        """By which it is called."""
        return str(self.function["name"])

    @property
    def parameters(self) -> Json:
        """The schema of its arguments; empty if it says nothing of them."""
        schema = self.function.get("parameters")
        return schema if isinstance(schema, dict) else {}

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of its calls must match its schema."""
        return self.function.get("strict") is True

    @property
    def chat_form(self) -> Json:
        """The tool in the form of chat."""
        return {"type": "function", "function": self.function}


def read_tools(field: str, value: object, read: ReadTool, max_tools: int = MAX_TOOLS) -> list[Tool]:
    """The tools of a list. Raises InvalidArgument naming the field, or one within it."""
    if not isinstance(value, list):
        raise InvalidArgument.field(field, "must be a list of tools")
    if len(value) > max_tools:
        raise InvalidArgument.field(field, f"must have up to {max_tools} entries, not {len(value)}")
    return [make_tool(f"{field}[{place}]", tool, read) for place, tool in enumerate(value)]


def make_tool(field: str, value: object, read: ReadTool) -> Tool:
    """One tool. Raises InvalidArgument naming the field, or one within it."""
    if not isinstance(value, dict):
        raise InvalidArgument.field(field, "must be an object")
    try:
        check_depth(value)
    except NotJson as error:
        raise InvalidArgument.field(field, "has too many objects and lists inside each other") from error
    tool = read(field, value)
    return Tool(json_text(tool), tool["function"])


def stored_tools(texts: Sequence[str]) -> list[Tool]:
    """Tools that were read and kept as JSON texts before."""
    return [Tool(text, json.loads(text)["function"]) for text in texts]


def read_chat_tool(field: str, tool: Any) -> Json:
    """A tool in the form of chat: it goes into the prompt as it is, but for what is null."""
    function = tool.get("function")
    if isinstance(function, dict) and None in function.values():
        tool = {**tool, "function": without_nulls(function)}
    check_tool(field, tool)
    return dict(tool)


def read_function(field: str, function: Any, schema_name: str = "parameters") -> Json:
    """A function whose fields stand by themselves. `schema_name` is the field with the schema of its arguments."""
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidArgument.field(f"{field}.name", "must be text, not empty")
    schema = function.get(schema_name)
    if not isinstance(schema, dict | None):
        raise InvalidArgument.field(f"{field}.{schema_name}", "must be a JSON schema")
    described: Json = {"name": function["name"], "parameters": schema or {"type": "object", "properties": {}}}
    if not isinstance(function.get("description"), str | None):
        raise InvalidArgument.field(f"{field}.description", "must be text")
    if function.get("description") is not None:
        described["description"] = function["description"]
    if function.get("strict") is True:
        described["strict"] = True
    return {"type": "function", "function": described}


def without_nulls(fields: Json) -> Json:
    """The same fields without those that are null, which is the same as leaving them out."""
    return {name: value for name, value in fields.items() if value is not None}
