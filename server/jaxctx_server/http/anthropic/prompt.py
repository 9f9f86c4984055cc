"""System text and messages of a request as the chat template reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.v1.content_pb2 import ChatMessage, ChatMessages, ToolCall
from jaxctx_server.chat_input import MAX_MESSAGES
from jaxctx_server.http.errors import json_text

Json = dict[str, Any]
NO_TOOLS: Mapping[str, str] = {}
BILLING_LINE = "x-anthropic-billing-header"  # begins a block that changes with every request and says nothing


class ReferredTools:
    """The tools of a request, as results write those to which they refer.

    Each definition is written once: a result that refers to the tool again only names it. A request could otherwise
    have a large definition written thousands of times.
    """

    def __init__(self, definitions: Mapping[str, str]) -> None:
        """`definitions`: JSON texts of the tools by their names."""
        self._definitions = definitions
        self._written: set[str] = set()

    def text(self, name: str, field: str) -> str:
        """What a result writes for a tool. Raises InvalidArgument naming the field if there is none of this name."""
        if name not in self._definitions:
            raise InvalidArgument.field(field, "names no tool of the request")
        if name in self._written:
            return json_text({"name": name})
        self._written.add(name)
        return self._definitions[name]


def parse_prompt(system: object, messages: object, definitions: Mapping[str, str] = NO_TOOLS) -> ChatMessages:
    """The prompt. A last message of the assistant is left open, so that the answer continues it.

    `definitions` are JSON texts of the tools by their names, for results that refer to tools.

    Raises InvalidArgument naming the field.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidArgument.field("messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    text = system_text(system)
    parsed = [ChatMessage(role="system", content=text)] if text else []
    referred = ReferredTools(definitions)
    for index, message in enumerate(messages):
        parsed += parse_message(message, f"messages[{index}]", referred)
    if len(parsed) > MAX_MESSAGES:
        raise InvalidArgument.field("messages", f"must have up to {MAX_MESSAGES} messages, tool results counted")
    if parsed[-1].role == "assistant" and not parsed[-1].tool_calls:
        return ChatMessages(messages=parsed, continue_final_message=True)
    return ChatMessages(messages=parsed, add_generation_prompt=True)


def system_text(system: object) -> str:
    """The system text, without billing lines. Raises InvalidArgument naming the field."""
    if system is None:
        return ""
    if isinstance(system, str):
        return "" if is_billing_line(system) else system
    if not isinstance(system, list):
        raise InvalidArgument.field("system", "must be a text or a list of text blocks")
    texts = [block_text(block, f"system[{index}]") for index, block in enumerate(system)]
    return "\n\n".join(text for text in texts if not is_billing_line(text))


def is_billing_line(text: str) -> bool:
    """Whether a text is the line with which a client tells how it bills."""
    return text.lstrip().lower().startswith(BILLING_LINE) and "\n" not in text.strip()


def parse_message(message: object, field: str, referred: ReferredTools) -> list[ChatMessage]:
    """A message; results of tools are messages of their own. Raises InvalidArgument naming the field."""
    if not isinstance(message, dict):
        raise InvalidArgument.field(field, "must be an object")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidArgument.field(f"{field}.content", "must be a text or a list of blocks")
    match role:
        case "assistant":
            return [parse_answer(content, f"{field}.content")]
        case "user" | "system":
            return parse_question(role, content, f"{field}.content", referred)
    raise InvalidArgument.field(f"{field}.role", "must be user, assistant or system")


def parse_question(role: str, blocks: Sequence[object], field: str, referred: ReferredTools) -> list[ChatMessage]:
    """Results of tools, and the text around them. Raises InvalidArgument naming the field."""
    messages: list[ChatMessage] = []
    texts: list[str] = []  # of the message that the last blocks make
    for index, block in enumerate(blocks):
        where = f"{field}[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            add_text(messages, role, texts)
            messages.append(
                ChatMessage(
                    role="tool",
                    content=result_text(block.get("content"), f"{where}.content", referred),
                    tool_call_id=text_field(block, "tool_use_id", where),
                )
            )
        else:
            texts.append(block_text(block, where))
    add_text(messages, role, texts)
    return messages or [ChatMessage(role=role)]


def add_text(messages: list[ChatMessage], role: str, texts: list[str]) -> None:
    """Append a message with these texts, if there are any, and take them out of the list."""
    if texts:
        messages.append(ChatMessage(role=role, content="".join(texts)))
        texts.clear()


def parse_answer(blocks: Sequence[object], field: str) -> ChatMessage:
    """A message of the assistant. Raises InvalidArgument naming the field."""
    answer = ChatMessage(role="assistant")
    thoughts: list[str] = []  # joined at the end: text that grows in a message is copied each time
    texts: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{field}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        match kind:
            case "thinking":
                thoughts.append(text_field(block, "thinking", where))
            case "redacted_thinking":
                pass  # nobody but its author can read it
            case "tool_use":
                answer.tool_calls.append(parse_tool_use(block, where))
            case _:
                texts.append(block_text(block, where))
    answer.reasoning, answer.content = "".join(thoughts), "".join(texts)
    return answer


def parse_tool_use(block: Any, field: str) -> ToolCall:
    """A call of a tool. Raises InvalidArgument naming the field."""
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise InvalidArgument.field(f"{field}.input", "must be an object")
    call_id, name = text_field(block, "id", field), text_field(block, "name", field)
    return ToolCall(id=call_id, name=name, arguments=json_text(arguments))


def result_text(content: object, field: str, referred: ReferredTools) -> str:
    """The text of the result of a tool. Raises InvalidArgument naming the field."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument.field(field, "must be a text or a list of text blocks")
    texts: list[str] = []
    functions: list[str] = []  # to which the last blocks refer
    for index, block in enumerate(content):
        where = f"{field}[{index}]"
        if is_tool_reference(block):
            functions.append(referred.text(text_field(block, "tool_name", where), f"{where}.tool_name"))
        else:
            add_functions(texts, functions)
            texts.append(block_text(block, where))
    add_functions(texts, functions)
    return "".join(texts)


def is_tool_reference(block: object) -> bool:
    """Whether a block of a result refers to a tool: by it a search of tools, which the client runs, loads one."""
    return isinstance(block, dict) and block.get("type") == "tool_reference"


def add_functions(texts: list[str], functions: list[str]) -> None:
    """Append definitions of functions, if there are any, and take them out of the list."""
    if functions:
        lines = "\n".join(f"<function>{function}</function>" for function in functions)
        texts.append(f"<functions>\n{lines}\n</functions>")
        functions.clear()


def block_text(block: object, field: str) -> str:
    """The text of a text block. Raises InvalidArgument naming the field."""
    if not isinstance(block, dict):
        raise InvalidArgument.field(field, "must be an object")
    if block.get("type") != "text":
        raise InvalidArgument.field(f"{field}.type", "is not supported here: only text is")
    return text_field(block, "text", field)


def text_field(block: Any, name: str, field: str) -> str:
    """A text of a block. Raises InvalidArgument naming its field."""
    text = block.get(name)
    if not isinstance(text, str):
        raise InvalidArgument.field(f"{field}.{name}", "must be a text")
    return text
