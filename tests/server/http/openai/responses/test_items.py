"""Items: read, refused, and as messages of the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.openai.responses.items import (
    MAX_INPUT_ITEMS,
    chat_messages,
    is_reference,
    new_id,
    parse_input,
    parse_items,
)

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4"}


def test_a_text_is_a_message_of_the_user() -> None:
    (item,) = parse_input("One")
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
    assert item["content"] == [{"type": "input_text", "text": "One"}]


def test_ids_are_kept_or_made() -> None:
    given, made = parse_input([{"id": "mine", "role": "user", "content": "x"}, {"role": "user", "content": "x"}])
    assert given["id"] == "mine"
    assert made["id"] != new_id("msg")


def test_contents_of_an_answer() -> None:
    content = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    (item,) = parse_input([{"role": "assistant", "content": content}])
    assert item["content"] == [{"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}]


def test_messages() -> None:
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = parse_input(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "2?"}]},
            thoughts,
            CALL,
            OUTPUT,
            {"role": "assistant", "content": "4"},
            {"role": "assistant", "content": "Four."},
        ]
    )
    messages = chat_messages(items)
    assert [(each.role, each.content) for each in messages] == [
        ("system", "Be brief."),
        ("user", "2+2?"),
        ("assistant", ""),
        ("tool", "4"),
        ("assistant", "4"),
        ("assistant", "Four."),
    ]
    assert messages[2].reasoning == "Hm."
    assert [(call.id, call.name, call.arguments) for call in messages[2].tool_calls] == [("c1", "f", "{}")]
    assert messages[3].tool_call_id == "c1"


def test_references_stay_where_they_may_be() -> None:
    named = [{"type": "item_reference", "id": "a"}, {"id": "b"}, {"type": None, "id": "c"}]
    found = parse_input([*named, {"role": "user", "content": "x", "id": "d"}], may_refer=True)
    assert found[:3] == [{"type": "item_reference", "id": each} for each in "abc"]
    assert [is_reference(item) for item in found] == [True, True, True, False]
    for item in named:
        with pytest.raises(InvalidArgument):
            parse_input([item])


def test_thoughts_that_a_client_has_not() -> None:
    (item,) = parse_input([{"type": "reasoning", "summary": [], "encrypted_content": "x"}])
    assert item["content"] == []
    assert chat_messages([item])[0].reasoning == ""


def test_the_output_of_a_function_in_parts() -> None:
    (item,) = parse_input([OUTPUT | {"output": [{"type": "input_text", "text": "4"}]}])
    assert item["output"] == "4"


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (5, "input[0]"),
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [5]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "output_text", "text": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text", "text": 5}]}, "input[0].content[0].text"),
        ({"role": "user", "content": "x", "id": 5}, "input[0].id"),
        ({"role": "user", "content": "x", "id": "x" * 129}, "input[0].id"),
        (CALL | {"arguments": {}}, "input[0].arguments"),
        (CALL | {"call_id": None}, "input[0].call_id"),
        (OUTPUT | {"output": 4}, "input[0].output"),
        (OUTPUT | {"output": [{"type": "input_image"}]}, "input[0].output[0].type"),
        ({"type": "reasoning", "content": [{"type": "text"}]}, "input[0].content[0].type"),
    ],
)
def test_the_field_is_named(item: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_input([item])
    assert raised.value.violations[0].field == field


def test_too_many_items() -> None:
    item = {"role": "user", "content": "x"}
    assert len(parse_input([item] * MAX_INPUT_ITEMS)) == MAX_INPUT_ITEMS
    with pytest.raises(InvalidArgument):
        parse_input([item] * (MAX_INPUT_ITEMS + 1))


def test_items_of_the_assistant_that_follow_each_other_are_one_message() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    answer = {"role": "assistant", "content": "a"}
    question = {"role": "user", "content": "q"}
    items = parse_items([question, thoughts, thoughts, answer, call, answer, question], "input")
    told = [(each.role, each.content, each.reasoning, len(each.tool_calls)) for each in chat_messages(items)]
    assert told == [
        ("user", "q", "", 0),
        ("assistant", "a", "hmhm", 1),
        ("assistant", "a", "", 0),
        ("user", "q", "", 0),
    ]
