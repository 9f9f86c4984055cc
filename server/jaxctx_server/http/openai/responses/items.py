"""Items of a response's input and output: read from a request, kept in one form, and written as chat messages.

input of a request ──▶ items (as the API returns them, each with an id) ──▶ messages of the chat template

An input may also refer to items by their ids; see `references.py`.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.v1.content_pb2 import ChatMessage, ToolCall
from jaxctx_server.chat_input import MAX_MESSAGES
from jaxctx_server.http.openai.responses.namespaces import full_name

Json = dict[str, Any]
MAX_INPUT_ITEMS = MAX_MESSAGES  # each is a message, or a part of one
INPUT_ROLES = ("user", "system", "developer", "assistant")
REFERENCE = "item_reference"
TEMPLATE_ROLES = {"developer": "system"}  # that chat templates know by another name


def new_id(prefix: str) -> str:
    """A new random id, as "msg_0f…": 128 random bits."""
    return f"{prefix}_{secrets.token_hex(16)}"


def parse_input(value: object, *, may_refer: bool = False) -> list[Json]:
    """The items of an input: a text, or a list of items. With `may_refer` references are among them as they are.

    Raises InvalidArgument naming the field.
    """
    if isinstance(value, str):
        return [message_item("user", [input_text(value)])]
    if not isinstance(value, list):
        raise InvalidArgument.field("input", "must be a text or a list of items")
    return parse_items(value, "input", may_refer=may_refer)


def parse_items(values: Sequence[object], field: str, *, may_refer: bool = False) -> list[Json]:
    """The items of a list. Raises InvalidArgument naming the field."""
    if len(values) > MAX_INPUT_ITEMS:
        raise InvalidArgument.field(field, f"must have up to {MAX_INPUT_ITEMS} items, not {len(values)}")
    return [parse_item(value, f"{field}[{index}]", may_refer=may_refer) for index, value in enumerate(values)]


def is_reference(item: Json) -> bool:
    """Whether an item of an input only names another one. Then its type may be left out."""
    return item.get("type") == REFERENCE or (item.get("type") is None and item.keys() - {"type"} == {"id"})


def parse_item(value: object, field: str, *, may_refer: bool = False) -> Json:
    """One item. Raises InvalidArgument naming the field."""
    if not isinstance(value, dict):
        raise InvalidArgument.field(field, "must be an object")
    if may_refer and is_reference(value):
        return {"id": given_id({"id": text_of(value, "id", field)}, field, ""), "type": REFERENCE}
    kind = value.get("type", "message")
    match kind:
        case "message":
            return parse_message(value, field)
        case "function_call":
            return parse_function_call(value, field)
        case "function_call_output":
            return {
                "id": given_id(value, field, "fco"),
                "type": "function_call_output",
                "status": "completed",
                "call_id": text_of(value, "call_id", field),
                "output": content_text(value.get("output"), f"{field}.output", ("input_text",)),
            }
        case "reasoning":
            return parse_reasoning(value, field)
    raise InvalidArgument.field(f"{field}.type", "must be message, function_call, function_call_output or reasoning")


def parse_function_call(value: Json, field: str) -> Json:
    """A call of a function. Raises InvalidArgument naming the field."""
    namespace = {} if value.get("namespace") is None else {"namespace": text_of(value, "namespace", field)}
    return {
        "id": given_id(value, field, "fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": text_of(value, "call_id", field),
        **namespace,
        "name": text_of(value, "name", field),
        "arguments": text_of(value, "arguments", field),
    }


def parse_message(value: Json, field: str) -> Json:
    """A message. Raises InvalidArgument naming the field."""
    role = text_of(value, "role", field)
    if role not in INPUT_ROLES:
        raise InvalidArgument.field(f"{field}.role", "must be user, assistant, system or developer")
    kinds = ("output_text", "input_text", "text") if role == "assistant" else ("input_text", "text")
    text = content_text(value.get("content"), f"{field}.content", kinds)
    content = [output_text(text)] if role == "assistant" else [input_text(text)]
    return message_item(role, content, given_id(value, field, "msg"))


def parse_reasoning(value: Json, field: str) -> Json:
    """Thoughts of an earlier answer. Raises InvalidArgument naming the field."""
    content = value.get("content") or []
    text = content_text(content, f"{field}.content", ("reasoning_text",))
    return reasoning_item(text, given_id(value, field, "rs"))


def content_text(content: object, field: str, kinds: Sequence[str]) -> str:
    """The text of a content: a text, or parts of these kinds. Raises InvalidArgument naming the field."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument.field(field, "must be a text or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(text_of(part, "refusal", where))
        elif kind in kinds:
            texts.append(text_of(part, "text", where))
        else:
            raise InvalidArgument.field(f"{where}.type", f"must be {' or '.join(kinds)}: only text is supported")
    return "".join(texts)


def text_of(value: Json, name: str, field: str) -> str:
    """A text of an object. Raises InvalidArgument naming its field."""
    text = value.get(name)
    if not isinstance(text, str):
        raise InvalidArgument.field(f"{field}.{name}", "must be a text")
    return text


def given_id(value: Json, field: str, prefix: str) -> str:
    """The id of an item, or a new one. Raises InvalidArgument."""
    given = value.get("id")
    if given is None:
        return new_id(prefix)
    if not isinstance(given, str) or not 0 < len(given) <= 128:
        raise InvalidArgument.field(f"{field}.id", "must be a text of 1 to 128 characters")
    return given


def input_text(text: str) -> Json:
    """A part of a message of the user."""
    return {"type": "input_text", "text": text}


def output_text(text: str, logprobs: Sequence[Json] = ()) -> Json:
    """A part of a message of the assistant."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(role: str, content: Sequence[Json], item_id: str = "", status: str = "completed") -> Json:
    """A message."""
    item_id = item_id or new_id("msg")
    return {"id": item_id, "type": "message", "status": status, "role": role, "content": list(content)}


def reasoning_item(text: str, item_id: str = "", status: str = "completed") -> Json:
    """Thoughts before an answer."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id or new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status}


@dataclass(slots=True)
class AnswerParts:
    """A message of the assistant that is being put together. Its texts are joined once: they may be many."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, item: Json) -> None:
        """Add an item of the assistant."""
        match item["type"]:
            case "reasoning":
                self.thoughts += (part["text"] for part in item["content"])
            case "function_call":
                name = full_name(item.get("namespace"), item["name"])
                self.tool_calls.append(ToolCall(id=item["call_id"], name=name, arguments=item["arguments"]))
            case _:
                self.texts.append(item_text(item))

    def message(self) -> ChatMessage:
        """The message."""
        return ChatMessage(
            role="assistant",
            content="".join(self.texts),
            reasoning="".join(self.thoughts),
            tool_calls=self.tool_calls,
        )


def chat_messages(items: Iterable[Json]) -> list[ChatMessage]:
    """The items as messages. Thoughts, text and calls of the assistant that follow each other are one message."""
    messages: list[ChatMessage] = []
    answer: AnswerParts | None = None  # of the assistant, to which the next items may belong
    for item in items:
        if is_of_assistant(item):
            if answer is not None and item["type"] == "message" and any(answer.texts):
                messages.append(answer.message())
                answer = None
            answer = answer or AnswerParts()
            answer.add(item)
            continue
        if answer is not None:
            messages.append(answer.message())
            answer = None
        messages.append(chat_message(item))
    if answer is not None:
        messages.append(answer.message())
    return messages


def is_of_assistant(item: Json) -> bool:
    """Whether an item is a part of an answer."""
    return item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant"


def chat_message(item: Json) -> ChatMessage:
    """An item that is not the assistant's as a message."""
    if item["type"] == "function_call_output":
        return ChatMessage(role="tool", content=item["output"], tool_call_id=item["call_id"])
    role: str = item["role"]
    return ChatMessage(role=TEMPLATE_ROLES.get(role, role), content=item_text(item))


def item_text(item: Json) -> str:
    """The text of a message."""
    return "".join(part["text"] for part in item["content"])
