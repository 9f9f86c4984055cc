"""WebSockets: each is admitted by the server's one pipeline, and so is each request that comes over it.

    handshake ─▶ host, origin ─▶ pipeline (key, role, limit of calls) ─▶ open
    message ─▶ pipeline ─▶ handler ─▶ messages

A connection that waits for a message is no call in progress: it costs no place in the limit of calls, but there are at
most `MAX_WEBSOCKETS`, and each ends after `IDLE_S` without a message. Requests of one connection are answered one after
the other. A client that goes away ends the work for it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from jaxctx.errors import JaxctxError, ResourceExhausted, Unauthenticated
from jaxctx_server.http.call import HttpCall, make_call
from jaxctx_server.http.endpoint import call_metadata
from jaxctx_server.http.errors import OPENAI_ERRORS, json_text
from jaxctx_server.http.frontend import Frontend, frontend_of
from jaxctx_server.http.headers import check_headers
from jaxctx_server.service.pipeline import Call, CallMetadata

Json = dict[str, Any]
Answer = Callable[[HttpCall], AsyncGenerator[Json, None]]
ErrorMessage = Callable[[JaxctxError, Json | None], Json | None]
MAX_WEBSOCKETS = 128  # of one server
MAX_WAITING = 4  # messages of one connection, while an earlier one is answered
IDLE_S = 600.0  # from the end of an answer to the next message
NORMAL, GOING_AWAY, NOT_TEXT, REFUSED = 1000, 1001, 1003, 1008  # codes of closing, of RFC 6455


def websocket_route(
    path: str, answer: Answer, error_message: ErrorMessage, *, method: str, operation: str | None = None
) -> WebSocketRoute:
    """A route of an API over WebSocket. `answer` makes the messages for one message, `error_message` that for an error
    and the last message before it (None: the client knows). `method` is the method of the contract that each message
    stands for, `operation` what traces call it.
    """
    return WebSocketRoute(path, WebSocketEndpoint(answer, error_message, method, operation))


@dataclass(frozen=True, slots=True)
class WebSocketEndpoint:
    """The ASGI application of one route."""

    answer: Answer
    error_message: ErrorMessage
    method: str
    operation: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frontend = frontend_of(scope)
        request = Request({**scope, "type": "http", "method": "GET"})
        metadata = call_metadata(self.method, request)
        try:
            async with frontend.backend.pipeline.admit(Call(metadata)):
                check_headers(request)
                if len(frontend.websockets) >= MAX_WEBSOCKETS:
                    message = f"there are {MAX_WEBSOCKETS} WebSockets already"
                    raise ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=1.0)
        except JaxctxError as error:
            await OPENAI_ERRORS.response(error)(scope, receive, send)
            return
        websocket = WebSocket(scope, receive, send)
        connection = Connection(
            self, frontend, request, replace(metadata, request_id=None, operation=self.operation), websocket
        )
        frontend.websockets.add(metadata.peer)
        try:
            with suppress(WebSocketDisconnect):
                await websocket.accept()
                await connection.serve()
        finally:
            frontend.websockets.discard(metadata.peer)


class Connection:
    """One WebSocket that is open."""

    def __init__(
        self,
        endpoint: WebSocketEndpoint,
        frontend: Frontend,
        request: Request,
        metadata: CallMetadata,
        websocket: WebSocket,
    ) -> None:
        """`request` is that of the handshake, `metadata` that of each call."""
        self._endpoint = endpoint
        self._frontend = frontend
        self._request = request
        self._metadata = metadata
        self._websocket = websocket
        self._waiting: deque[bytes] = deque()  # messages that came while another one was answered
        self._receiving: asyncio.Task[bytes] | None = None

    async def serve(self) -> None:
        """Answer messages until the client leaves or the connection is closed. Raises WebSocketDisconnect."""
        try:
            while True:
                message = await self._next_message()
                if message is None:
                    await self._websocket.close(GOING_AWAY, f"nothing was asked for {IDLE_S:g} seconds")
                    return
                if not await self._answered(message):
                    return
        finally:
            if self._receiving is not None:
                self._receiving.cancel()
                await asyncio.gather(self._receiving, return_exceptions=True)

    async def _next_message(self) -> bytes | None:
        """The next message. None: none came for too long."""
        if self._waiting:
            return self._waiting.popleft()
        receiving = self._begin_receiving()
        done, _ = await asyncio.wait({receiving}, timeout=IDLE_S)
        if not done:
            return None
        self._receiving = None
        return receiving.result()

    async def _answered(self, message: bytes) -> bool:
        """Answer a message while further ones are received. False: the connection was closed."""
        working = asyncio.create_task(self._answer(message))
        try:
            while not working.done():
                receiving = self._begin_receiving()
                await asyncio.wait({working, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    self._receiving = None
                    self._waiting.append(receiving.result())
                    if len(self._waiting) > MAX_WAITING:
                        await self._websocket.close(REFUSED, f"more than {MAX_WAITING} messages wait for an answer")
                        return False
            return working.result()
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    def _begin_receiving(self) -> asyncio.Task[bytes]:
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._receive())
        return self._receiving

    async def _receive(self) -> bytes:
        """The next message. Raises WebSocketDisconnect."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", NORMAL))
        text = message.get("text")
        if text is None:
            await self._websocket.close(NOT_TEXT, "a message must be text")
            raise WebSocketDisconnect(NOT_TEXT)
        return str(text).encode(errors="surrogatepass")

    async def _answer(self, message: bytes) -> bool:
        """Answer one message, as one call. False: the connection was closed, as the key is not valid any more."""
        call = Call(self._metadata)
        pipeline = self._frontend.backend.pipeline
        last: Json | None = None
        try:
            async with pipeline.admit(call, transport_errors=(WebSocketDisconnect,)):
                made = make_call(self._request, message, self._frontend, call)
                async with aclosing(self._endpoint.answer(made)) as answers:
                    async for answer in answers:
                        await self._websocket.send_text(json_text(answer))
                        last = answer
        except JaxctxError as error:
            told = self._endpoint.error_message(error, last)
            if told is not None:
                await self._websocket.send_text(json_text(told))
            if isinstance(error, Unauthenticated):
                await self._websocket.close(REFUSED, "the key is not valid any more")
                return False
        return True
