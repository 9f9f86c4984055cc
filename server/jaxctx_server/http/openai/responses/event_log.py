"""The events of a response that is made in the background, for any number of readers at any time.

A reader begins behind the number of the event that it had last, and follows until the response ends. Nobody waits for a
reader: one that falls behind what is kept gets an error.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.events import typed_event

Json = dict[str, Any]
MAX_KEPT_BYTES = 4 << 20  # of one response: the oldest events are dropped, until the response is stored as a whole


class EventLog:
    """The events of one response."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.deltas: list[list[int]] = []
        """By item of the output: the length of each of its deltas, in characters. With the items these give the same
        events again."""
        self.logprob_counts: list[list[int]] = []
        """The same for the tokens whose log probabilities each delta tells."""
        self.next_number = 0
        self._max_bytes = max_bytes
        # Those that have the whole response are written for each reader: it may be large, and its parts are shared.
        self._events: deque[str | Json] = deque()
        self._first_number = 0
        self._size_bytes = 0
        self._has_ended = False
        self._changed = asyncio.Event()

    def add(self, event: Json) -> None:
        """Add the next event."""
        numbered = {**event, "sequence_number": self.next_number}
        kept: str | Json = numbered if "response" in event else typed_event(event["type"], numbered)
        self.next_number += 1
        self._note_delta(event)
        self._events.append(kept)
        self._size_bytes += kept_bytes(kept)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= kept_bytes(self._events.popleft())
            self._first_number += 1
        self._notify()

    def end(self) -> None:
        """There are no more events."""
        self._has_ended = True
        self._notify()

    async def follow(self, starting_after: int) -> AsyncGenerator[str, None]:
        """The events behind this number (-1: all) as server-sent events, until there are no more.

        Raises InvalidArgument naming `starting_after` for events that are not kept any more.
        """
        number = starting_after + 1
        while True:
            changed = self._changed
            while number < self.next_number:
                if number < self._first_number:
                    message = f"must be at least {self._first_number - 1}: earlier events are not kept any more"
                    raise InvalidArgument.field("starting_after", message)
                event = self._events[number - self._first_number]
                yield event if isinstance(event, str) else typed_event(event["type"], event)
                number += 1
            if self._has_ended:
                return
            await changed.wait()

    def _note_delta(self, event: Json) -> None:
        delta = event.get("delta")
        if event["type"] == "response.output_item.added":
            self.deltas.append([])
            self.logprob_counts.append([])
        elif isinstance(delta, str):
            self.deltas[event["output_index"]].append(len(delta))
            self.logprob_counts[event["output_index"]].append(len(event.get("logprobs", ())))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def kept_bytes(event: str | Json) -> int:
    """What an event takes, about. The response that some have is that of all."""
    return len(event) if isinstance(event, str) else 0
