"""What a gateway takes of anybody who reaches it: so many connections, in so much time, and so much JSON.

`Protocol` is uvicorn's for HTTP/1.1, with limits of a connection before there is a request, where no application sees
it. Every refusal is JSON, as those of the applications are. `loaded` counts what a body holds before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jaxctx.errors import InvalidArgument

MAX_CONNECTIONS = 512
MAX_HEADER_BYTES = 16 << 10
HEADERS_S = 10.0  # from a connection, or the first byte of another request on it, to the end of its headers
BODY_S = 30.0  # from there to the end of its body
IDLE_S = 5  # between two requests
LINGER_S = 1.0  # of a connection that was refused, for its answer to be read
SLICE = 4 << 10  # bytes that are looked at before it is known whether headers are too long
JSON = (b"content-type", b"application/json")
TYPES = {408: "deadline_exceeded", 503: "unavailable"}
TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def error_of(status: int, message: str) -> str:
    """An error of HTTP's own, as JSON."""
    told = {"message": message, "type": TYPES.get(status, "invalid_argument"), "code": "HTTP", "param": None}
    return json.dumps({"error": told})


class Protocol(H11Protocol):
    """One connection. It is being waited for while headers or a body are on their way."""

    _waiting: str | None = None  # for what
    _refused = False  # and what comes is no longer looked at
    _timer: asyncio.TimerHandle | None = None
    since = 0.0  # when it came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self._wait("headers")
        if len(self.connections) > MAX_CONNECTIONS:
            # Rather one that has asked for nothing than one that comes to ask.
            unused = [each for each in self.connections if isinstance(each, Protocol) and each.asks_for_nothing()]
            oldest = min(unused, key=lambda each: each.since)  # it is one itself
            oldest.refuse(503, f"there are {MAX_CONNECTIONS} connections already")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and self.conn.their_state is h11.IDLE and not self._refused:
            # In slices: of headers that come at once h11 would find the end, however long they are.
            super().data_received(data[:SLICE])
            data = data[SLICE:]
        if self._refused:
            return
        if data:
            super().data_received(data)
        if not self._refused:
            their_state = self.conn.their_state
            self._wait({h11.IDLE: "headers", h11.SEND_BODY: "body"}.get(their_state))

    def asks_for_nothing(self) -> bool:
        """Whether there is no request, or none any more."""
        return self._waiting == "headers" or self.timeout_keep_alive_task is not None

    def send_400_response(self, msg: str) -> None:
        """What h11 cannot read, while that is being handled."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            msg = f"the headers must have up to {MAX_HEADER_BYTES} bytes"
        self.refuse(status, msg)

    def refuse(self, status: int, message: str) -> None:
        """End the connection, with an error if none of another answer has been sent."""
        if self.transport.is_closing():
            self.connections.discard(self)
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_of(status, message).encode()
            retry = [(b"retry-after", b"1")] if status == 503 else []
            headers = [JSON, (b"content-length", str(len(body)).encode()), (b"connection", b"close"), *retry]
            answer = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b""))
            with suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
                for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # whoever works on an answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refused = True
        self._wait(None)
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        # A connection that is closed while something is on its way to it would take the answer with it.
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _wait(self, waiting: str | None) -> None:
        if waiting == self._waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waiting, self._timer = waiting, None
        if waiting is not None:
            limit_s = HEADERS_S if waiting == "headers" else BODY_S
            self._timer = self.loop.call_later(limit_s, self._too_slow, waiting, limit_s)

    def _too_slow(self, waiting: str, limit_s: float) -> None:
        self.refuse(408, f"the {waiting} must be there within {limit_s:g} seconds")


def loaded(data: bytes, *, most_values: int, most_parts: int) -> Any:
    """What JSON says. It may have so many values, and among them so many texts, names, lists and objects.

    Raises InvalidArgument for more, which is counted first: an empty list of two bytes takes 56 in memory. Raises what
    `json.loads` does for what is no JSON.
    """
    parts = data.count(b'"') // 2 + data.count(b"[") + data.count(b"{")
    values = data.count(b",") + 1
    if parts > most_parts or values > most_values:  # what stands in texts was counted as well
        bare, texts = TEXT.subn(b"", data, count=most_parts + 1)
        parts = texts + bare.count(b"[") + bare.count(b"{")
        values = bare.count(b",") + 1
        if parts > most_parts:
            raise InvalidArgument(f"the body must have up to {most_parts} texts, lists and objects")
        if values > most_values:
            raise InvalidArgument(f"the body must have up to {most_values} values")
    return json.loads(data)
