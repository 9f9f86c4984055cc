"""Tools and calls for templates that do not know them by themselves.

Most templates read the variable `tools`, and `tool_calls` of messages. Some read less, though the model was trained on
calls: Phi-4 mini's reads tools only from the system message, as text, and neither it nor Granite 3's writes calls.
`transformers` drops there what the template does not read. Here it is written as the model was trained on it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2.meta
import jinja2.nodes

from jaxctx.model.text.tool_calls import ToolCallFormat

Message = Mapping[str, Any]
TOOLS, TOOL_CALLS = "tools", "tool_calls"


@dataclass(frozen=True, slots=True)
class TemplateReads:
    """What a template reads of what it is given."""

    tools: bool  # the variable
    tools_of_messages: bool  # a key of messages
    tool_calls: bool  # of messages

    @property
    def any_tools(self) -> bool:
        return self.tools or self.tools_of_messages


def template_reads(tree: jinja2.nodes.Template) -> TemplateReads:
    """What the template of this syntax tree reads."""
    attributes = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    texts = {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return TemplateReads(
        tools=TOOLS in jinja2.meta.find_undeclared_variables(tree),
        tools_of_messages=TOOLS in attributes | _subscripts(tree),
        tool_calls=TOOL_CALLS in attributes | texts,
    )


def _subscripts(tree: jinja2.nodes.Template) -> set[str]:
    """The keys that a template reads as `message['key']` or `message.get('key')`."""
    keys = [node.arg for node in tree.find_all(jinja2.nodes.Getitem)]
    for call in tree.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr == "get":
            keys += call.args[:1]
    return {key.value for key in keys if isinstance(key, jinja2.nodes.Const) and isinstance(key.value, str)}


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, with the tools' functions as JSON in the system message, which is empty if there was none."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], TOOLS: text}, *messages[1:]]
    return [{"role": "system", "content": "", TOOLS: text}, *messages]


def with_calls_as_text(messages: Sequence[Message], calls: ToolCallFormat) -> list[Message]:
    """The messages, with calls in their text as the model writes them, and results in the role that it knows."""
    return [_with_calls_as_text(message, calls) for message in messages]


def _with_calls_as_text(message: Message, calls: ToolCallFormat) -> Message:
    if message["role"] == "tool":
        return {**message, "role": calls.result_role}
    if not message.get(TOOL_CALLS):
        return message
    functions = [call["function"] for call in message[TOOL_CALLS]]
    text = calls.text([(each["name"], each["arguments"]) for each in functions])
    others = {key: value for key, value in message.items() if key != TOOL_CALLS}
    return {**others, "content": f"{message['content']}{text}"}
