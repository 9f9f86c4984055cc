"""Namespaces: functions under a common name, as coding agents send them.

    {"type": "namespace", "name": "agents", "description": ..., "tools": [{"type": "function", "name": "spawn", ...}]}

The model reads every function by its full name, "agents.spawn", with the namespace and its description beside it. A
call of it is told, and kept, as a call of "spawn" in the namespace "agents".
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.tools import Tool

Json = dict[str, Any]


def full_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def is_namespace(tool: object) -> bool:
    """Whether a tool of a request is a namespace."""
    return isinstance(tool, dict) and tool.get("type") == "namespace"


def namespace_of(tool: Json, field: str) -> Json:
    """Name and description of a namespace whose `tools` are a list. Raises InvalidArgument naming the field."""
    name, description = tool.get("name"), tool.get("description", "")
    if not isinstance(name, str) or not name:
        raise InvalidArgument.field(f"{field}.name", "must be a text")
    if not isinstance(description, str):
        raise InvalidArgument.field(f"{field}.description", "must be a text")
    if not isinstance(tool.get("tools"), list):
        raise InvalidArgument.field(f"{field}.tools", "must be a list of functions")
    return {"name": name, "description": description}


def put_into_namespace(tool: Json, namespace: Json) -> Json:
    """A function in the form of chat, as one of a namespace."""
    function = tool["function"] | {"name": full_name(namespace["name"], tool["function"]["name"])}
    return {"type": "function", "namespace": namespace, "function": function}


def called_function(tools: Sequence[Tool], name: str) -> tuple[str | None, str]:
    """Namespace (None: none) and own name of the function that the model calls by `name`."""
    for tool in tools:
        if tool.name == name:
            return own_name(json.loads(tool.text))
    return None, name


def own_name(tool: Json) -> tuple[str | None, str]:
    """Namespace (None: none) and own name of a function in the form of chat."""
    name: str = tool["function"]["name"]
    if "namespace" not in tool:
        return None, name
    namespace: str = tool["namespace"]["name"]
    return namespace, name.removeprefix(full_name(namespace, ""))


def response_tools(tools: Sequence[str]) -> list[Json]:
    """Tools of chat in the form of this API. Functions of a namespace that follow each other are in one."""
    told: list[Json] = []
    for namespace, group in groupby((json.loads(text) for text in tools), lambda tool: tool.get("namespace")):
        functions = [function_json(tool) for tool in group]
        told += functions if namespace is None else [{"type": "namespace", **namespace, "tools": functions}]
    return told


def function_json(tool: Json) -> Json:
    """A function of chat in the form of this API."""
    function = tool["function"]
    return {
        "type": "function",
        "name": own_name(tool)[1],
        "description": function.get("description"),
        "parameters": function["parameters"],
        "strict": function.get("strict", False),
    }
