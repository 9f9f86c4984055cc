"""Chat messages of a request as chat templates read them: dicts, as templates of the Hugging Face hub expect them.

A template reads arguments of tool calls, tools and further variables as objects; the contract has them as JSON text. It
is parsed here, strictly: what no JSON text can hold (NaN, numbers beyond a double, lone surrogates) and more than
`MAX_DEPTH` objects inside each other are refused, with the path of the field.

Arguments of calls were written by a model, which may be cut off or write something else than an object. A conversation
with such a call can go on: a template that takes arguments as a text has what the model wrote, any other an empty
object.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.chat import ChatTemplate, TemplateOptions
from jaxctx.v1.content_pb2 import ChatMessage, ChatMessages, ToolCall

MAX_MESSAGES = 8192  # of a prompt: as many as the contract has
MESSAGE_SIZE = 32  # characters that a message, a call or a tool costs beside its own
MAX_DEPTH = 64  # of objects and lists inside each other
Json = dict[str, Any]


class NotJson(ValueError):
    """A text is not the JSON that is wanted; the text of the error says why."""


def template_messages(
    chat: ChatMessages, template: ChatTemplate, template_call_id: Callable[[str], str] = str
) -> list[Json]:
    """Messages as this template reads them, with ids of calls as `template_call_id` makes them.

    Raises InvalidArgument naming the field of arguments that no JSON text can hold, or that are too deep.
    """
    messages = enumerate(chat.messages)
    return [
        template_message(f"messages.messages[{place}]", each, template, template_call_id) for place, each in messages
    ]


def template_message(
    path: str, message: ChatMessage, template: ChatTemplate, template_call_id: Callable[[str], str]
) -> Json:
    """One message. Keys beside `role` and `content` are there only if the message has something for them."""
    fields: Json = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = template_call_id(message.tool_call_id)
    if message.tool_calls:
        fields["tool_calls"] = [
            template_tool_call(f"{path}.tool_calls[{place}]", call, template, template_call_id)
            for place, call in enumerate(message.tool_calls)
        ]
    return fields


def template_tool_call(
    path: str, call: ToolCall, template: ChatTemplate, template_call_id: Callable[[str], str]
) -> Json:
    """A call, with its arguments as the template reads them."""
    function = {"name": call.name, "arguments": call_arguments(f"{path}.arguments", call.arguments, template)}
    return {"id": template_call_id(call.id), "type": "function", "function": function}


def call_arguments(path: str, text: str, template: ChatTemplate) -> Json | str:
    """The arguments of a call as an object. What is none: its text, or an empty object if the template takes no text.

    Raises InvalidArgument with the path for what no JSON text can hold, and for what is too deep.
    """
    if not text:
        return {}
    try:
        value = parse_value(text)
    except json.JSONDecodeError:
        value = None  # it was cut, or is another text
    except (ValueError, RecursionError) as error:
        raise no_object(path, error) from error
    if isinstance(value, dict):
        return value
    return text if template.takes_text_arguments else {}


def template_options(chat: ChatMessages, template: ChatTemplate) -> TemplateOptions:
    """Tools and further variables.

    Raises InvalidArgument naming the field that is no such object, or `tools` if the template would not write them.
    """
    if chat.tools and not template.reads_tools:
        raise InvalidArgument.field("messages.tools", "the model's chat template knows no tools")
    tools = [parse_tool(f"messages.tools[{place}]", text) for place, text in enumerate(chat.tools)]
    return TemplateOptions(
        tools=tools or None,
        arguments=parse_template_arguments(chat.template_arguments, template),
        continue_final_message=chat.continue_final_message,
    )


def parse_tool(path: str, text: str) -> Json:
    """A tool of the form {"type": "function", "function": {"name": ..., "parameters": {...}}}."""
    tool = parse_object(path, text)
    check_tool(path, tool)
    return tool


def check_tool(path: str, tool: Json) -> None:
    """Raise InvalidArgument, with the path of what is wrong, for an object that is no tool."""
    if tool.get("type") != "function":
        raise InvalidArgument.field(f"{path}.type", 'must be "function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidArgument.field(f"{path}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgument.field(f"{path}.function.name", "must be text, not empty")
    if not isinstance(function.get("description", ""), str):
        raise InvalidArgument.field(f"{path}.function.description", "must be text")
    if not isinstance(function.get("parameters", {}), dict):
        raise InvalidArgument.field(f"{path}.function.parameters", "must be an object")


def parse_template_arguments(text: str, template: ChatTemplate) -> Json:
    """Further variables of the template."""
    if not text:
        return {}
    path = "messages.template_arguments"
    arguments = parse_object(path, text)
    for name in arguments:
        if name in template.reserved_names:
            raise InvalidArgument.field(f"{path}.{name}", "is set by the server")
    return arguments


def parse_object(path: str, text: str) -> Json:
    """The object that is written in JSON. Raises InvalidArgument with the path if it is none."""
    try:
        value = parse_value(text)
    except (ValueError, RecursionError) as error:
        raise no_object(path, error) from error
    if not isinstance(value, dict):
        raise InvalidArgument.field(path, "must be a JSON object")
    return value


def no_object(path: str, error: Exception) -> InvalidArgument:
    """The error for a text that is no JSON object, for this reason."""
    reason = f": {error}" if isinstance(error, NotJson) else ""
    return InvalidArgument.field(path, f"must be a JSON object{reason}")


def parse_value(text: str) -> Any:
    """The value that is written in JSON.

    Raises JSONDecodeError for what is no JSON, NotJson for what no JSON text can hold and for what is too deep,
    ValueError for a number that is too long, RecursionError for a text that is far too deep.
    """
    value = json.loads(text, parse_constant=refuse_constant, parse_float=finite_float)
    check_depth(value)
    if "\\u" in text:
        check_surrogates(value)
    return value


def refuse_constant(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's parser takes."""
    raise NotJson("it has a number that JSON has not")


def finite_float(text: str) -> float:
    """A number with a fraction or an exponent. Raises NotJson for one beyond a double."""
    value = float(text)
    if not math.isfinite(value):
        raise NotJson("it has a number that is too large")
    return value


def check_depth(value: Any) -> None:
    """Raise NotJson for too many objects and lists inside each other."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inside += each.values()
            elif isinstance(each, list):
                inside += each
        if not inside:
            return
        level = inside
    raise NotJson(f"it has more than {MAX_DEPTH} objects and lists inside each other")


def check_surrogates(value: Any) -> None:
    """Raise NotJson for half of a character, which no text in UTF-8 can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise NotJson("a text has a lone surrogate") from error


def chat_size(chat: ChatMessages) -> int:
    """The cost of messages, in characters."""
    size = len(chat.template_arguments) + sum(len(tool) + MESSAGE_SIZE for tool in chat.tools)
    return size + sum(map(message_size, chat.messages))


def message_size(message: ChatMessage) -> int:
    """The cost of one message, in characters."""
    texts = (message.role, message.content, message.name, message.tool_call_id, message.reasoning)
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) + MESSAGE_SIZE for call in message.tool_calls)
    return sum(map(len, texts)) + calls + MESSAGE_SIZE
