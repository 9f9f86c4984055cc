"""The events of a response in the background: numbered, bounded, and read by any number of readers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.openai.responses.event_log import EventLog


def delta(text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "output_index": 0, "delta": text, "logprobs": []}


ADDED = {"type": "response.output_item.added", "output_index": 0, "item": {}}


async def numbers(log: EventLog, starting_after: int = -1) -> list[int]:
    return [json.loads(event.partition("data: ")[2])["sequence_number"] async for event in log.follow(starting_after)]


async def test_a_reader_begins_anywhere_and_follows_to_the_end() -> None:
    log = EventLog()
    log.add(ADDED)
    readers = [asyncio.create_task(numbers(log, after)) for after in (-1, 0, 1, 9)]
    for _ in range(3):
        await asyncio.sleep(0)
        log.add(delta("a"))
    log.end()
    assert await asyncio.gather(*readers) == [[0, 1, 2, 3], [1, 2, 3], [2, 3], []]
    assert await numbers(log, 2) == [3]


async def test_it_keeps_the_latest_only() -> None:
    log = EventLog(max_bytes=10_000)
    log.add(ADDED)
    slow = log.follow(-1)
    assert "output_item" in await anext(slow)
    for _ in range(100):
        log.add(delta("x" * 1000))
    log.end()
    assert sum(len(event) for event in log._events) <= 10_000
    for reader in (slow, log.follow(-1)):
        with pytest.raises(InvalidArgument, match="starting_after: must be at least"):
            await anext(reader)
    kept = await numbers(log, log._first_number - 1)
    assert kept == list(range(log._first_number, 101))


async def test_whole_responses_are_shared_and_not_counted() -> None:
    log = EventLog(max_bytes=10)
    log.add({"type": "response.created", "response": {"instructions": "x" * 1000}})
    log.end()
    (event,) = [event async for event in log.follow(-1)]
    assert event.startswith("event: response.created\ndata: ")


def test_it_notes_how_each_item_came() -> None:
    log = EventLog()
    log.add(ADDED)
    for text in ("ab", "", "c"):
        log.add(delta(text))
    log.add({**ADDED, "output_index": 1})
    log.add({"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{}"})
    assert log.deltas == [[2, 0, 1], [2]]
    assert log.logprob_counts == [[0, 0, 0], [0]]
