"""The events of a response once more, out of what is stored; and documents that are none of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx_server.http.openai.responses.event_log import EventLog
from jaxctx_server.http.openai.responses.output import OutputBuilder
from jaxctx_server.http.openai.responses.replay import (
    Deltas,
    beginning,
    ending,
    has_output,
    in_progress,
    is_deltas,
    numbered_replay,
)


def data_of(event: str) -> Any:
    return json.loads(event.partition("data: ")[2])


async def test_they_are_the_same() -> None:
    log, output = EventLog(), OutputBuilder()
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    events = (
        output.reasoning("Hm") + output.reasoning(".") + output.text("", [entry]) + output.text("So: ", [entry] * 2)
    )
    events += output.start_call("call_0", "f", "agents") + output.call_arguments("{}")
    events += output.start_call("call_1", "f") + output.call_arguments('{"a"') + output.call_arguments(": 1}")
    events += output.close("completed") + output.reasoning("But") + output.finish("incomplete")
    resource = {"id": "resp_1", "status": "incomplete", "output": output.items, "error": None}
    for event in [*beginning(resource), in_progress(resource), *events, ending(resource)]:
        log.add(event)
    log.end()
    deltas = Deltas.read(json.loads(json.dumps(Deltas.of(log).document())))
    seen = [data_of(event) async for event in log.follow(-1)]
    for starting_after in (-1, 0, 5, len(seen) - 2, len(seen)):
        again = [data_of(event) for event in numbered_replay(resource, deltas, 0, starting_after)]
        assert again == seen[starting_after + 1 :]
    assert [item["type"] for item in resource["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "reasoning",
        "message",
    ]


def test_of_one_that_was_ended_only_the_last_is_known() -> None:
    resource = {"id": "resp_1", "status": "failed", "output": [], "error": None}
    events = [data_of(event) for event in numbered_replay(resource, Deltas([], []), 40, 1)]
    assert [(event["type"], event["sequence_number"]) for event in events] == [("response.failed", 40)]
    assert list(numbered_replay(resource, Deltas([], []), 40, 40)) == []


@pytest.mark.parametrize(
    "document",
    [{"delta_lengths": 5}, {"delta_lengths": [5]}, {"delta_lengths": [["1"]]}, {"delta_logprobs": [[-1]]}],
)
def test_what_is_no_deltas(document: dict[str, Any]) -> None:
    assert not is_deltas(document)
    assert is_deltas({})


MESSAGE: dict[str, Any] = {"id": "m", "type": "message", "status": "completed", "content": [{"text": "abc"}]}


@pytest.mark.parametrize(
    "output",
    [
        None,
        ["x"],
        [{"id": "m"}],
        [{**MESSAGE, "content": [{}]}],
        [{**MESSAGE, "content": None}],
        [{**MESSAGE, "type": "function_call"}],
        [{**MESSAGE, "content": [{"text": "a", "logprobs": 5}]}],
    ],
)
def test_what_is_no_output(output: Any) -> None:
    assert not has_output({"status": "completed", "output": output})


@pytest.mark.parametrize("lengths", [[], [[9, 9]], [[1], [1], [1]]])
def test_lengths_that_are_not_those_of_the_output(lengths: list[list[int]]) -> None:
    """A caller can save any: whatever comes, the text is told whole in the end."""
    resource = {"status": "completed", "output": [MESSAGE], "error": None}
    assert has_output(resource)
    events = [data_of(event) for event in numbered_replay(resource, Deltas(lengths, lengths), 0, -1)]
    assert events[-1]["response"]["output"] == [MESSAGE]
    assert events[-1]["type"] == "response.completed"
