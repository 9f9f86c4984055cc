"""The events of the page, for its tests."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import aiohttp


class PageEvent(NamedTuple):
    type: str
    data: Any


def parse_event(text: str) -> PageEvent | None:
    """An event as the server wrote it; None for a comment."""
    if text.startswith(":"):
        return None
    first, second = text.strip("\n").split("\n")
    return PageEvent(first.removeprefix("event: "), json.loads(second.removeprefix("data: ")))


async def until(stream: AsyncGenerator[str, None], is_last: Callable[[PageEvent], bool]) -> list[PageEvent]:
    """The events up to one."""
    found: list[PageEvent] = []
    async for text in stream:
        event = parse_event(text)
        if event is None:
            continue
        found.append(event)
        if is_last(event):
            return found
    raise AssertionError(f"the stream ended after {found}")


async def all_events(stream: AsyncGenerator[str, None]) -> list[PageEvent]:
    """All events of a stream that ends."""
    return [event for event in [parse_event(text) async for text in stream] if event is not None]


async def read_events(response: aiohttp.ClientResponse) -> AsyncGenerator[str, None]:
    """The events of a response of HTTP, as texts."""
    waiting = ""
    async for data in response.content.iter_any():
        *whole, waiting = (waiting + data.decode()).split("\n\n")
        for text in whole:
            yield text + "\n\n"
