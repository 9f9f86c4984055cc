"""Routes: each is admitted by the server's one pipeline as a call of the contract, then handled, then answered.

    request ─▶ pipeline (key, request id, limit of calls) ─▶ headers ─▶ body ─▶ handler ─▶ response

All of it, also sending the response, is within the admission, so that a key that is revoked ends a stream. The work
ends as soon as the client is gone.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jaxctx.errors import JaxctxError
from jaxctx_server.http.call import HttpCall, make_call
from jaxctx_server.http.errors import OPENAI_ERRORS, ErrorForm
from jaxctx_server.http.frontend import frontend_of
from jaxctx_server.http.headers import check_headers
from jaxctx_server.http.request_body import has_no_body, read_body
from jaxctx_server.metrics.calls import HTTP
from jaxctx_server.service.pipeline import Call, CallMetadata

METHODS_WITH_BODY = ("POST", "PUT", "PATCH")
CHAT = "chat"  # gen_ai.operation.name of OpenTelemetry for answers to messages
EVENT_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
Handler = Callable[[HttpCall], Awaitable[Response]]


def api_route(
    path: str,
    handler: Handler,
    methods: Sequence[str] = ("GET",),
    *,
    method: str,
    errors: ErrorForm = OPENAI_ERRORS,
    headers: Sequence[str] = (),
    operation: str | None = None,
    reads_body: bool = True,
) -> Route:
    """A route of an API. `method` is the method of the contract that it stands for, "/jaxctx.v1.ContextService/Fill":
    the caller's key must allow that. `errors` is the form that errors have in this API. `headers` are those that the
    handler reads and that other paths refuse (see `headers.py`). `operation` is what traces call it (CHAT); None: what
    they call the method. `reads_body` False: a POST needs no body here, and so no content type.
    """
    return Route(path, Endpoint(handler, method, errors, headers, operation, reads_body), methods=list(methods))


class EventStream(Response):
    """Server-sent events as they come. The response begins with the first of them, so that an error before it has a
    status of its own. The generator is closed at once if the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={**EVENT_STREAM_HEADERS, **(headers or {})}, media_type=self.media_type)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not has_begun:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    has_begun = True
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        if not has_begun:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b""})


@dataclass(slots=True)
class ResponseSender:
    """Sends the response of one request, with its request id, and remembers how far that has got."""

    send: Send
    call: Call
    errors: ErrorForm
    has_begun: bool = False
    is_event_stream: bool = False
    events_sent: int = 0
    has_ended: bool = False

    async def __call__(self, message: Message) -> None:
        """Send a message of ASGI."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = list(message["headers"])
            self.is_event_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            headers += [(name.encode(), self.call.request_id.encode()) for name in self.errors.request_id_headers]
            message = {**message, "headers": headers}
        elif message.get("more_body", False):
            self.events_sent += self.is_event_stream
        else:
            self.has_ended = True
        await self.send(message)

    async def refuse(self, error: JaxctxError, scope: Scope, receive: Receive) -> None:
        """Send an error: as the response, or as the last event of a stream that has begun."""
        if self.has_ended:
            return
        if not self.has_begun:
            response = self.errors.response(error)
            await response(scope, receive, self)
            return
        last_event = self.errors.event(error, self.events_sent).encode() if self.is_event_stream else b""
        await self({"type": "http.response.body", "body": last_event})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The ASGI application of one route."""

    handler: Handler
    method: str
    errors: ErrorForm
    headers: Sequence[str] = ()
    operation: str | None = None
    reads_body: bool = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        call = Call(call_metadata(self.method, request, self.operation))
        sender = ResponseSender(send, call, self.errors)
        frontend = frontend_of(scope)
        try:
            async with frontend.backend.pipeline.admit(call, transport_errors=(ClientDisconnect,)):
                check_headers(request, self.headers)
                body = await self._body(request)
                async with ended_by_disconnect(receive):
                    response = await self.handler(make_call(request, body, frontend, call))
                    await response(scope, receive, sender)
        except ClientDisconnect:
            pass  # nobody reads an answer
        except JaxctxError as error:
            with suppress(ClientDisconnect):
                await sender.refuse(error, scope, receive)

    async def _body(self, request: Request) -> bytes:
        """The body, empty for methods that have none. Raises HttpError."""
        if request.method not in METHODS_WITH_BODY or (not self.reads_body and has_no_body(request)):
            return b""
        return await read_body(request)


@asynccontextmanager
async def ended_by_disconnect(receive: Receive) -> AsyncIterator[None]:
    """While entered, the work of a request whose body was received. Raises ClientDisconnect once the client is gone."""
    loop = asyncio.get_running_loop()
    end = asyncio.timeout(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        end.reschedule(loop.time())

    watching: asyncio.Task[None] | None = None
    try:
        async with end:
            watching = asyncio.create_task(watch())
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not end.expired():
            raise  # of the work itself
        raise ClientDisconnect from None


def call_metadata(method: str, request: Request, operation: str | None = None) -> CallMetadata:
    """The properties of a call that the headers and the connection of a request have.

    A key is `authorization: Bearer KEY`, or `x-api-key: KEY`, as clients of the Anthropic API send it.
    """
    client = request.client
    authorization = request.headers.get("authorization")
    if authorization is None and "x-api-key" in request.headers:
        authorization = f"Bearer {request.headers['x-api-key']}"
    return CallMetadata(
        method=method,
        peer="" if client is None else f"{client.host}:{client.port}",
        authorization=authorization,
        request_id=request.headers.get("x-request-id"),
        tenant=None,
        incarnation=None,
        traceparent=request.headers.get("traceparent"),
        transport=HTTP,
        operation=operation,
    )
