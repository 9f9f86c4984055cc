"""Tools and calls for templates that do not know them by themselves.

Most templates read the variable `tools`, and `tool_calls` of messages. Some read less, though the model was trained on
calls: Phi-4 mini's reads tools only from the system message, as text, and neither it nor Granite 3's writes calls.
`transformers` drops there what the template does not read. Here it is written as the model was trained on it.

gpt-oss's writes one call of a message and no other, refuses one that has a text and thoughts too, and fails on a tool
without a description.
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


def with_descriptions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools, each with a description: an empty one where there was none."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with a message for each call, behind which its results come, as of a model that ends its turn with
    a call. What was said before a call is a part of its thoughts where there are any.
    """
    found: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get(TOOL_CALLS)
        if not calls:
            found.append(message)
            continue
        results: list[Message] = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        found += _one_by_one(_with_thoughts_alone(message), results)
    return found


def _with_thoughts_alone(message: Message) -> Message:
    """A message with calls, without a text if it has thoughts."""
    thoughts, text = message.get("reasoning_content"), message["content"]
    if not thoughts or not text:
        return message
    return {**message, "reasoning_content": f"{thoughts}\n{text}", "content": ""}


def _one_by_one(message: Message, results: Sequence[Message]) -> list[Message]:
    """A message for each call of one that has several, each with its results behind it; other results come last."""
    first, *more = message[TOOL_CALLS]
    if not more:
        return [message, *results]
    of_call: list[list[Message]] = [[] for _ in message[TOOL_CALLS]]
    others: list[Message] = []
    for result in results:
        place = _call_of(result, message[TOOL_CALLS], of_call)
        (others if place is None else of_call[place]).append(result)
    found: list[Message] = []
    for call, own in zip((first, *more), of_call, strict=True):
        begun = message if call is first else {"role": message["role"], "content": ""}
        found += [{**begun, TOOL_CALLS: [call]}, *own]
    return [*found, *others]


def _call_of(result: Message, calls: Sequence[Any], of_call: Sequence[Sequence[Message]]) -> int | None:
    """The place of the call that a result is of: by its id, else by its name, else the next call without a result.

    Of several that it may be, the first without a result. None: it has the id of no call.
    """
    result_id = result.get("tool_call_id")
    places = range(len(calls))
    named = [place for place in places if result.get("name") == calls[place]["function"]["name"]]
    candidates = [place for place in places if calls[place].get("id") == result_id] if result_id else named
    if not candidates:
        candidates = named if result_id else [place for place in places if not of_call[place]]
    return next((place for place in candidates if not of_call[place]), next(iter(candidates), None))


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
