"""Content blocks of an answer: their events, and what becomes of text, thoughts and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx_server.http.anthropic.output import ContentBuilder, arguments_of, new_call_id


def kinds(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]


def test_one_block_is_open_at_a_time() -> None:
    content = ContentBuilder()
    assert kinds(content.thinking("Hm")) == [("start", 0), ("delta", 0)]
    assert kinds(content.thinking(".")) == [("delta", 0)]
    assert kinds(content.text("Yes")) == [("stop", 0), ("start", 1), ("delta", 1)]
    assert kinds(content.text(".")) == [("delta", 1)]
    assert kinds(content.start_call("toolu_1", "look")) == [("stop", 1), ("start", 2)]
    assert kinds(content.call_arguments('{"a": ')) == [("delta", 2)]
    assert kinds(content.call_arguments("1}")) == [("delta", 2)]
    assert kinds(content.start_call("toolu_2", "look")) == [("stop", 2), ("start", 3)]
    assert kinds(content.close()) == [("stop", 3)]
    assert content.blocks == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes."},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
    ]


def test_what_events_hold() -> None:
    content = ContentBuilder()
    start, delta = content.thinking("Hm")
    assert start["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert delta["delta"] == {"type": "thinking_delta", "thinking": "Hm"}
    _, start, delta = content.text("Yes")
    assert start["content_block"] == {"type": "text", "text": ""}
    assert delta["delta"] == {"type": "text_delta", "text": "Yes"}
    _, start = content.start_call("toolu_1", "look")
    assert start["content_block"] == {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    (delta,) = content.call_arguments("{")
    assert delta["delta"] == {"type": "input_json_delta", "partial_json": "{"}


def test_text_behind_a_call_is_a_block_of_its_own() -> None:
    content = ContentBuilder()
    content.text("a")
    content.start_call("toolu_1", "look")
    content.text("b")
    content.close()
    assert [block["type"] for block in content.blocks] == ["text", "tool_use", "text"]


def test_no_text_is_no_block() -> None:
    content = ContentBuilder()
    assert content.text("") == content.thinking("") == content.close() == content.blocks == []


def test_arguments_of_no_call() -> None:
    content = ContentBuilder()
    content.text("a")
    with pytest.raises(ValueError, match="no call"):
        content.call_arguments("{}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ('{"a": ', {}),  # an output that broke off
        ("[1]", {}),
        ("null", {}),
        ("[" * 200_000 + "]" * 200_000, {}),
    ],
)
def test_arguments_are_an_object(text: str, expected: dict[str, Any]) -> None:
    assert arguments_of(text) == expected


def test_ids_of_calls_are_different() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(each.startswith("toolu_") and json.dumps(each) for each in ids)


def test_numbers_beyond_all_floats_are_the_last_ones() -> None:
    """JSON can write them, but what Python makes of them is in no JSON."""
    last = 1.7976931348623157e308
    assert arguments_of('{"a": [1e999, -1e999, 1.5, 7]}') == {"a": [last, -last, 1.5, 7]}
