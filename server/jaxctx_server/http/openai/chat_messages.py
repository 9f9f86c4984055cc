"""Messages of a chat request as those of the contract.

Roles go as they are, but for `developer`, which is `system` to all templates of the supported families, and `function`,
the older name of `tool`. A `function_call` is the older form of one call, without an id: it gets one, and so does the
next message of a function, which has its result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.openai.fields import NOTHING
from jaxctx_server.http.openai.request import check_asks_for_nothing

Json = Mapping[str, Any]
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
UNSUPPORTED_MESSAGE_FIELDS = ("audio", "prefix")
MAX_TOOL_CALLS = 128


def parse_messages(messages: Sequence[object]) -> list[dict[str, Any]]:
    """The fields of ChatMessages. Raises InvalidArgument, naming the field of the message."""
    parsed: list[dict[str, Any]] = []
    older_call_id = ""
    for index, message in enumerate(messages):
        fields = parse_message(index, message)
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(message, dict) and message.get("function_call"):
            older_call_id = fields["tool_calls"][0]["id"]
        elif role == "function" and older_call_id and "tool_call_id" not in fields:
            fields["tool_call_id"] = older_call_id
        parsed.append(fields)
    return parsed


def parse_message(index: int, message: object) -> dict[str, Any]:
    """The fields of a ChatMessage. Raises InvalidArgument, naming the field of the message."""
    path = f"messages[{index}]"
    fields: Json = message if isinstance(message, dict) else {}
    for name in UNSUPPORTED_MESSAGE_FIELDS:
        if fields.get(name) is not None:
            check_asks_for_nothing(f"{path}.{name}", fields[name], NOTHING)
    role = fields.get("role")
    if not isinstance(role, str):
        raise InvalidArgument.field(f"{path}.role", "must be text")
    parsed: dict[str, Any] = {"role": TEMPLATE_ROLES.get(role, role)}
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list):
        raise InvalidArgument.field(f"{path}.tool_calls", "must be a list of calls")
    if fields.get("function_call"):
        if calls:
            raise InvalidArgument.field(f"{path}.function_call", "must not be together with tool_calls")
        check_may_call(f"{path}.function_call", role)
        call = parse_function(f"{path}.function_call", fields["function_call"])
        parsed["tool_calls"] = calls = [{"id": f"call_{index}", **call}]
    elif calls:
        parsed["tool_calls"] = parse_tool_calls(f"{path}.tool_calls", role, calls)
    parsed["content"] = parse_content(f"{path}.content", fields, may_be_absent=bool(calls) and role == "assistant")
    for name in ("name", "tool_call_id"):
        if fields.get(name) is not None:
            parsed[name] = text_in(f"{path}.{name}", fields[name])
    for name in ("reasoning", "reasoning_content"):  # of both the latter counts; typed clients send all fields, as null
        if fields.get(name) is not None:
            parsed["reasoning"] = text_in(f"{path}.{name}", fields[name])
    return parsed


def parse_content(path: str, fields: Json, *, may_be_absent: bool) -> str:
    """The text of a message."""
    content = fields.get("content")
    if content is None:
        refusal = fields.get("refusal")
        if isinstance(refusal, str):
            return refusal
        if may_be_absent:
            return ""
    text = text_of(content)
    if text is None:
        raise InvalidArgument.field(path, "must be text")
    return text


def text_of(content: object) -> str | None:
    """The text of a message's content, which may be in parts; None if any part is something else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def parse_tool_calls(path: str, role: str, calls: list[Any]) -> list[dict[str, str]]:
    """The calls that the assistant asked for."""
    check_may_call(path, role)
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidArgument.field(path, f"must have up to {MAX_TOOL_CALLS} entries, not {len(calls)}")
    return [parse_tool_call(f"{path}[{place}]", call) for place, call in enumerate(calls)]


def check_may_call(path: str, role: str) -> None:
    """Raise InvalidArgument for calls in a message of somebody else than the assistant."""
    if role != "assistant":
        raise InvalidArgument.field(path, "may be only in messages of the assistant")


def parse_tool_call(path: str, call: object) -> dict[str, str]:
    """One call: its id, name and arguments."""
    fields: Json = call if isinstance(call, dict) else {}
    if fields.get("type", "function") != "function":
        raise InvalidArgument.field(f"{path}.type", "must be function")
    call_id = fields.get("id")
    return {
        "id": "" if call_id is None else text_in(f"{path}.id", call_id),
        **parse_function(f"{path}.function", fields.get("function")),
    }


def parse_function(path: str, function: object) -> dict[str, str]:
    """The name and the arguments of a call; these may be an object instead of its JSON text."""
    if not isinstance(function, dict):
        raise InvalidArgument.field(path, "must be an object")
    name = text_in(f"{path}.name", function.get("name"))
    if not name:
        raise InvalidArgument.field(f"{path}.name", "must not be empty")
    parsed = {"name": name}
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        try:
            parsed["arguments"] = json_text(arguments)
        except RecursionError as error:
            message = "has too many objects and lists inside each other"
            raise InvalidArgument.field(f"{path}.arguments", message) from error
    elif arguments is not None:
        parsed["arguments"] = text_in(f"{path}.arguments", arguments)
    return parsed


def text_in(path: str, value: object) -> str:
    """A value that must be text."""
    if not isinstance(value, str):
        raise InvalidArgument.field(path, "must be text")
    return value
