"""Items of an output and their events."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx_server.http.openai.responses.output import OutputBuilder


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text() -> None:
    output = OutputBuilder()
    events = output.text("a") + output.text("b") + output.finish("completed")
    assert kinds(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert events[0]["item"]["content"] == []
    assert events[4]["text"] == "ab"
    (item,) = output.items
    assert item == events[-1]["item"]
    assert {event.get("item_id", item["id"]) for event in events} == {item["id"]}


def test_every_kind_of_item_has_its_place() -> None:
    output = OutputBuilder()
    events = output.reasoning("Hm.") + output.text("So: ") + output.start_call("call_1", "f")
    events += output.call_arguments("{") + output.call_arguments("}") + output.close("completed")
    events += output.start_call("call_2", "g") + output.finish("incomplete")
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in output.items] == ["completed", "completed", "completed", "incomplete"]
    assert output.items[2]["arguments"] == "{}"
    for index, item in enumerate(output.items):
        of_item = [event for event in events if event["output_index"] == index]
        assert (of_item[0]["type"], of_item[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert of_item[0]["item"]["status"] == "in_progress"
        assert of_item[-1]["item"] == item


@pytest.mark.parametrize("thoughts", ["", "Hm."])
def test_an_output_without_text_has_an_empty_message(thoughts: str) -> None:
    output = OutputBuilder()
    events = output.reasoning(thoughts) + output.text("") + output.finish("completed")
    assert output.items[-1]["type"] == "message"
    assert output.items[-1]["content"][0]["text"] == ""
    assert len(output.items) == (2 if thoughts else 1)
    assert events[-1]["type"] == "response.output_item.done"


def test_a_call_alone_needs_no_message() -> None:
    output = OutputBuilder()
    output.start_call("call_1", "f")
    output.finish("completed")
    assert [item["type"] for item in output.items] == ["function_call"]


def test_log_probabilities() -> None:
    output = OutputBuilder()
    first: Any = {"token": "a", "logprob": -1.0}
    second: Any = {"token": "", "logprob": -2.0}
    events = output.text("a", [first]) + output.text("", [second]) + output.finish("completed")
    assert [event["logprobs"] for event in events if event["type"].endswith("output_text.delta")] == [[first], [second]]
    assert output.items[0]["content"][0]["logprobs"] == [first, second]


def test_arguments_without_a_call() -> None:
    with pytest.raises(ValueError, match="no call"):
        OutputBuilder().call_arguments("{}")
