"""Limits of one HTTP connection, before there is a request that an application could see.

`LimitedProtocol` is uvicorn's protocol for HTTP/1.1 with a limit on connections, on the size of headers, and on the
time that headers and bodies may take. Every refusal is JSON, as the refusals of the application are.

    waiting for headers ──headers──▶ waiting for the body ──body──▶ answering ──▶ waiting for headers
            │                               │           │
            └─────────── too slow ──────────┴──▶ refused (408), closed after LINGER_S
                                                        └── reads nothing for STALLED_S ──▶ aborted
"""

import asyncio
import sys
from contextlib import suppress
from typing import Literal

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jaxctx_server.http.errors import http_error_json
from jaxctx_server.http.request_id import request_id_header

MAX_CONNECTIONS = 512
MAX_HEADER_BYTES = 16 << 10
HEADERS_TIMEOUT_S = 10.0  # from the start of a connection, or of another request on it, to the end of its headers
BODY_TIMEOUT_S = 30.0  # from there to the end of the body
KEEP_ALIVE_S = 5  # between two requests
MAX_AGE_S = 3600.0  # a request on an older connection is the last one there, as with gRPC
STALLED_S = 300.0  # a client that has taken nothing of its answer for so long is cut off
LINGER_S = 1.0  # a refused connection stays open for so long, so that the client can read the answer
MAX_WEBSOCKET_HEADERS, MAX_WEBSOCKET_HEADER_BYTES = 100, 8000  # of a request for a WebSocket
MAX_EARLY_BYTES = 64 << 10  # of what comes behind a request that is not answered yet
HEADER_SLICE_BYTES = 4 << 10  # bytes that are parsed at once until the headers are known not to be too long
JSON_HEADER = (b"content-type", b"application/json")


class LimitedProtocol(H11Protocol):
    """One connection. A timer runs while its headers or a body are on their way, and one while its client does not read
    what is sent.
    """

    _waiting_for: Literal["headers", "body"] | None = None
    _refused = False  # what still arrives is dropped
    _upgraded = False  # it is a WebSocket now, with a protocol of its own
    _timer: asyncio.TimerHandle | None = None
    _stalled_timer: asyncio.TimerHandle | None = None  # runs while sending is paused, or the connection is closing
    _unsent_bytes = 0  # when that timer was started
    opened_at = 0.0  # on the clock of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened_at = self.loop.time()
        self._wait_for("headers")
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse_oldest_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self._stop_stalled_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Headers are parsed in slices: of headers that come at once h11 would find the end however long they are.
        while data and self.conn.their_state is h11.IDLE and not self._refused:
            super().data_received(data[:HEADER_SLICE_BYTES])
            data = data[HEADER_SLICE_BYTES:]
        if data and not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        """Handle what has arrived: also, when an answer is complete, the next request that came before it was.

        That waits until the client has read the answer, so that who does not read has one answer to wait for at most.
        """
        if self.flow.write_paused and self.conn.their_state is h11.IDLE:
            self.flow.pause_reading()
            return
        super().handle_events()
        if self._refused or self._upgraded:
            return
        if self.cycle is not None and not self.cycle.response_started:
            self._make_last_if_old()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= MAX_EARLY_BYTES:
            # uvicorn stops reading at what comes behind a request; then nobody would notice that the client leaves.
            self.flow.resume_reading()
        if self.conn.their_state is h11.SEND_BODY:
            self._wait_for("body")
        elif self.conn.their_state is not h11.IDLE:
            self._wait_for(None)
        elif self.conn.trailing_data[0]:  # the first bytes of a request; between two there is a time of its own
            self._wait_for("headers")

    def _make_last_if_old(self) -> None:
        """Have the answer to the present request say that none may follow it, if the connection is old.

        So balancers can move connections, and a caller whose certificate is not accepted any more comes to notice.
        """
        if self.loop.time() - self.opened_at >= MAX_AGE_S and CLOSE_HEADER not in self.headers:
            self.headers.append(CLOSE_HEADER)  # as if the client had asked for it

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_stalled_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_stalled_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stalled_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.transport.is_closing():
            return
        self._stop_stalled_timer()
        if self.conn.their_state is h11.IDLE:
            self.flow.resume_reading()
            self.handle_events()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to uvicorn's protocol for WebSocket."""
        self._upgraded = True
        self._wait_for(None)
        self._stop_stalled_timer()
        super().handle_websocket_upgrade(event)

    def _should_upgrade(self) -> bool:
        """Whether a request asks for a WebSocket. What the package websockets could not parse is left to HTTP."""
        return (
            self.scope["method"] == "GET"
            and len(self.headers) <= MAX_WEBSOCKET_HEADERS
            and all(len(name) + len(value) <= MAX_WEBSOCKET_HEADER_BYTES for name, value in self.headers)
            and super()._should_upgrade()
        )

    def is_idle(self) -> bool:
        """Whether this connection has no request, or none any more. Its client may still have to read the answer."""
        is_kept_alive = self.timeout_keep_alive_task is not None
        return self._waiting_for == "headers" or is_kept_alive or self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot parse; uvicorn calls this while it handles h11's error."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status >= 500:  # of a transfer-encoding other than chunked; it is the client that is wrong
            status = 400
        if status == 431:
            msg = f"the headers must have up to {MAX_HEADER_BYTES} bytes"
        self.refuse(status, msg)

    def refuse(self, status: int, message: str) -> None:
        """End the connection, with an error as its answer unless another answer has begun."""
        if self.transport.is_closing():  # for as long as its client does not read
            self.connections.discard(self)
            self.transport.abort()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(status, message)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # tells the application that its client is gone
            self.cycle.message_event.set()
        self._refused = True
        self._wait_for(None)
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        # If it were closed while data is on its way to it, the reset would take the answer with it.
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self._close_refused)

    def _close_refused(self) -> None:
        """End a connection whose client had time to read why."""
        self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)  # or it would stay for as long as nobody reads

    def _send_error(self, status: int, message: str) -> None:
        body = http_error_json(status, message).encode()
        length = (b"content-length", str(len(body)).encode())
        headers = [JSON_HEADER, length, request_id_header(None), (b"connection", b"close")]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b""))
        with suppress(h11.LocalProtocolError):  # the answer to HEAD has no body
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    def _refuse_oldest_idle(self) -> None:
        """Make place for a new connection. It is idle itself, so that there always is one to refuse."""
        idle = [each for each in self.connections if isinstance(each, LimitedProtocol) and each.is_idle()]
        oldest = min(idle, key=lambda each: each.opened_at)
        oldest.refuse(503, f"there are {MAX_CONNECTIONS} connections already")

    def _wait_for(self, waiting_for: Literal["headers", "body"] | None) -> None:
        """Start the timer of what is waited for, if that has changed."""
        if waiting_for == self._waiting_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waiting_for, self._timer = waiting_for, None
        if waiting_for is not None:
            timeout_s = HEADERS_TIMEOUT_S if waiting_for == "headers" else BODY_TIMEOUT_S
            self._timer = self.loop.call_later(timeout_s, self._refuse_slow, waiting_for, timeout_s)

    def _refuse_slow(self, waiting_for: str, timeout_s: float) -> None:
        self.refuse(408, f"the {waiting_for} must be there within {timeout_s:g} seconds")

    def _start_stalled_timer(self) -> None:
        """Abort the connection unless its client reads. While this runs nothing is added to what it has to read."""
        self._stop_stalled_timer()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stalled_timer = self.loop.call_later(STALLED_S, self._abort_stalled)

    def _stop_stalled_timer(self) -> None:
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None

    def _abort_stalled(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._start_stalled_timer()
        else:
            self.transport.abort()
