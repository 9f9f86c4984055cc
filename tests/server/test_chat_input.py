"""Chat messages as templates read them: what is made of them, and what is refused, by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text import ChatTemplate
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.rules_pb2 import rule
from jaxctx_server.chat_input import MAX_DEPTH, MAX_MESSAGES, chat_size, template_messages, template_options

TEMPLATE = ChatTemplate("{{ tools }}", special_tokens={"bos_token": "<s>"})
TEXT_TEMPLATE = ChatTemplate(
    "{% for message in messages %}{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "c"}]


def refused(chat: ChatMessages) -> list[str]:
    """The fields that are refused, each with its description."""
    with pytest.raises(InvalidArgument) as raised:
        template_messages(chat, TEMPLATE)
        template_options(chat, TEMPLATE)
    return [violation.field for violation in raised.value.violations]


def test_the_contract_has_as_many_messages() -> None:
    [field] = [each for each in ChatMessages.DESCRIPTOR.fields if each.name == "messages"]
    assert field.GetOptions().Extensions[rule].max_items == MAX_MESSAGES


def test_a_plain_message_has_no_other_keys() -> None:
    """Templates ask whether a key is there."""
    assert template_messages(ChatMessages(messages=[{"role": "user"}]), TEMPLATE) == [{"role": "user", "content": ""}]


def test_everything_that_a_message_may_have() -> None:
    calls = [{"id": "1", "name": "f", "arguments": '{"a": {"b": [1.5, "é"]}}'}, {"name": "g"}]
    chat = ChatMessages(
        messages=[
            {"role": "assistant", "content": "c", "reasoning": "r", "tool_calls": calls},
            {"role": "tool", "content": "7", "tool_call_id": "1", "name": "f"},
        ]
    )
    assert template_messages(chat, TEMPLATE) == [
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "r",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": {"b": [1.5, "é"]}}},
                },
                {"id": "", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "7", "tool_call_id": "1", "name": "f"},
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        '{"a": ' + "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH + "}",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_arguments_that_no_json_text_can_hold(arguments: str) -> None:
    calls = [{"name": "f", "arguments": "{}"}, {"name": "f", "arguments": arguments}]
    chat = ChatMessages(messages=[*USER, {"role": "assistant", "tool_calls": calls}])
    assert refused(chat) == ["messages.messages[1].tool_calls[1].arguments"]


@pytest.mark.parametrize("arguments", ["[1]", "7", '"text"', "null", "{", '{"city": "Bo', '{"a": 1} x', "see above"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    """A model was cut off, or wrote something else: the conversation goes on, with what the template takes of it."""
    chat = ChatMessages(messages=[*USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}])
    for template, expected in ((TEXT_TEMPLATE, arguments), (TEMPLATE, {})):
        (_, message) = template_messages(chat, template)
        assert message["tool_calls"][0]["function"]["arguments"] == expected
    (_, message) = template_messages(chat, TEXT_TEMPLATE)
    assert TEXT_TEMPLATE.render([message]) == json.dumps(arguments)


def test_arguments_as_deep_as_may_be() -> None:
    deep = '{"a": ' + "[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1) + "}"
    chat = ChatMessages(messages=[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": deep}]}])
    (message,) = template_messages(chat, TEMPLATE)
    assert json.dumps(message["tool_calls"][0]["function"]["arguments"]) == deep


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"type": "retrieval"}, ".type"),
        ({"function": "f"}, ".function"),
        ({"function": {}}, ".function.name"),
        ({"function": {"name": ""}}, ".function.name"),
        ({"function": {"name": 7}}, ".function.name"),
        ({"function": {"name": "f", "description": 7}}, ".function.description"),
        ({"function": {"name": "f", "parameters": []}}, ".function.parameters"),
    ],
)
def test_tools_of_another_form(change: dict[str, Any], field: str) -> None:
    tools = [json.dumps(TOOL), json.dumps(TOOL | change)]
    assert refused(ChatMessages(messages=USER, tools=tools)) == ["messages.tools[1]" + field]


def test_a_tool_that_is_no_json() -> None:
    assert refused(ChatMessages(messages=USER, tools=["{"])) == ["messages.tools[0]"]


def test_tools_that_the_template_would_not_write() -> None:
    chat = ChatMessages(messages=USER, tools=[json.dumps(TOOL)])
    with pytest.raises(InvalidArgument) as raised:
        template_options(chat, ChatTemplate("{{ messages }} {{ other_tools_of }}"))
    assert [violation.field for violation in raised.value.violations] == ["messages.tools"]


def test_ids_of_calls_are_as_the_template_takes_them() -> None:
    calling = {"role": "assistant", "tool_calls": [{"id": "call_1", "name": "f"}]}
    chat = ChatMessages(messages=[calling, {"role": "tool", "tool_call_id": "call_1"}])
    call, result = template_messages(chat, TEMPLATE, TOOL_CALL_FORMATS["mistral"].template_call_id)
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9


def test_no_tools_are_none() -> None:
    """Templates ask whether `tools` is none."""
    assert template_options(ChatMessages(messages=USER), TEMPLATE).tools is None
    assert template_options(ChatMessages(messages=USER, tools=[json.dumps(TOOL)]), TEMPLATE).tools == [TOOL]


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "range"]
)
def test_variables_of_the_server_cannot_be_replaced(name: str) -> None:
    chat = ChatMessages(messages=USER, template_arguments=json.dumps({"fine": 1, name: "x"}))
    assert refused(chat) == [f"messages.template_arguments.{name}"]


@pytest.mark.parametrize("text", ["[]", "true", "{'a': 1}", '{"a": Infinity}'])
def test_template_arguments_that_are_no_json_object(text: str) -> None:
    assert refused(ChatMessages(messages=USER, template_arguments=text)) == ["messages.template_arguments"]


def test_template_arguments_are_variables() -> None:
    chat = ChatMessages(messages=USER, template_arguments='{"enable_thinking": false, "n": {"a": 1}}')
    options = template_options(chat, TEMPLATE)
    assert options.arguments == {"enable_thinking": False, "n": {"a": 1}}
    source = "{% if enable_thinking is defined and not enable_thinking %}{{ n.a }}{% endif %}"
    assert ChatTemplate(source).render(template_messages(chat, TEMPLATE), options=options) == "1"


def test_every_text_counts_towards_the_size() -> None:
    """It decides on which thread the messages are rendered."""
    text = "x" * 10_000
    for chat in (
        ChatMessages(messages=[{"role": "u", "content": text}]),
        ChatMessages(messages=[{"role": "u", "reasoning": text}]),
        ChatMessages(messages=[{"role": "u", "tool_calls": [{"name": "f", "arguments": text}]}]),
        ChatMessages(messages=USER, tools=[text]),
        ChatMessages(messages=USER, template_arguments=text),
        ChatMessages(messages=[{"role": "u", "tool_calls": [{}] * 128}] * 3),
    ):
        assert chat_size(chat) > 10_000
