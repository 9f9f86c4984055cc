#!/usr/bin/env python3
"""REST for a server: the calls of its contract that say so, as JSON over HTTP, and a page that shows programs live.

    scripts/rest_gateway.py [SERVER] [--port PORT]

Routes are what the contract says (`google.api.http` in protos/jaxctx/v1), so that any gateway of that kind serves the
same. Each request becomes one call of the server with the key (`authorization`) that came with it: who may do what and
what is valid is decided there. The gateway keeps nothing, and listens on loopback only: to be reached from elsewhere it
needs a proxy in front of it that has TLS.

A body is the request as JSON, by the names of its fields; without a body they are in the query. Answers are JSON too,
an error is {"error": {"message", "type", "code", "param"}}. A text that is read as it comes is server-sent events, with
`[DONE]` at the end, or an event `error` instead. A call ends when whoever made it is gone. Headers that would change
what a request means elsewhere (`x-session-id`, `x-session-ttl`, `x-session-mode` and others) are refused with 400 and
their name. Up to 512 connections are served; headers have up to 16 KiB and 10 seconds, a body 8 MiB and 30 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import uvicorn
from draw_program import svg
from gateway_limits import IDLE_S, MAX_HEADER_BYTES, Protocol, error_of, loaded
from google.api import annotations_pb2
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxctx.convert import decode
from jaxctx.errors import Internal, InvalidArgument, JaxctxError
from jaxctx.rpc import CHANNEL_OPTIONS, from_rpc_error, method_of
from jaxctx.services import METHODS
from jaxctx.types import GraphTask, VariableInfo
from jaxctx.v1.rules_pb2 import rule as rule_of

SERVER, PORT = "127.0.0.1:50051", 8000
PAGE = Path(__file__).with_name("rest_gateway.html")
MAX_BODY_BYTES = 8 << 20  # as of a message
SMALL_BODY_BYTES = 64 << 10  # larger ones are read beside the event loop, one at a time
SPARE_PARTS = 1000  # of a body, beside those that its fields may have
NOT_HERE = (  # headers that change what a request means, to servers that have them
    "x-session-id",
    "x-session-ttl",
    "x-session-mode",
    "x-http-method-override",
    "x-http-method",
    "x-method-override",
    "grpc-timeout",
)
PASSED_ON = ("authorization", "x-request-id")  # headers
OWN_NAMES = ("localhost", "127.0.0.1")  # other ones are how a page from elsewhere would get around its browser
STATUS = {  # as gateways have it; all else is 500
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
GONE = Response(status_code=499)  # for nobody
LAST_WORDS_S = 5  # for texts that are being read when it is to end
# Of what parses bodies; json_format has none of its own for what is no object or has a name with half a character.
REFUSALS = (json_format.ParseError, ValueError, OverflowError, TypeError, AttributeError, RecursionError, SystemError)
Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class OwnNames:
    """Refuses requests for another host's name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            name = Request(scope).headers.get("host", "").partition(":")[0]
            if name.lower() not in OWN_NAMES:
                app = Response(error_of(400, "the host must be localhost"), 400, media_type="application/json")
        await app(scope, receive, send)


def application(server: str) -> Starlette:
    """The gateway to a server, "host:port" or "unix:/path"."""
    return gateway(server, [*routes(), Route("/v1/session/{session_id}/graph.svg", typed(picture)), Route("/", page)])


def gateway(server: str, routes: list[Route]) -> Starlette:
    """One that answers on these routes."""

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        app.state.reading = asyncio.Lock()
        async with grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS) as app.state.channel:
            yield

    return Starlette(
        routes=routes,
        middleware=[Middleware(OwnNames)],
        exception_handlers={HTTPException: unserved, Exception: broken},
        lifespan=connected,
    )


def routes() -> list[Route]:
    """Those of the contract."""
    found = []
    for rpc, method in METHODS.items():
        rule = method.GetOptions().Extensions[annotations_pb2.http]
        answer = typed(partial(streamed if method.server_streaming else answered, rpc))
        for binding in (rule, *rule.additional_bindings) if rule.WhichOneof("pattern") else ():
            verb = binding.WhichOneof("pattern")
            found.append(Route(getattr(binding, verb), answer, methods=[verb.upper()]))
    return found


def typed(work: Endpoint) -> Endpoint:
    """Answers as `work` does, and with the error that it raises."""

    async def endpoint(request: Request) -> Response:
        try:
            check_headers(request)
            return await work(request)
        except grpc.RpcError as error:
            return refused(from_rpc_error(error))
        except JaxctxError as error:
            return refused(error)
        except ClientDisconnect:
            return GONE
        except asyncio.CancelledError:
            if own_end():
                raise
            return GONE

    return endpoint


def check_headers(request: Request) -> None:
    """Raise InvalidArgument for a header that must not be left unread."""
    for name in NOT_HERE:
        if name in request.headers:
            raise InvalidArgument.field(name, "is a header that is not supported here")


def own_end() -> bool:
    """Whether this task was cancelled, and not the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def answered(rpc: str, request: Request) -> Response:
    """With the one response of a call."""
    call = await begun(rpc, request)
    return Response(as_json(await call), media_type="application/json")


async def streamed(rpc: str, request: Request) -> Response:
    """With the responses of a call, from when the first is there."""
    call = await begun(rpc, request)
    first = await call.read()

    async def events() -> AsyncIterator[str]:
        response = first
        try:
            while response is not grpc.aio.EOF:
                yield f"data: {as_json(response)}\n\n"
                response = await call.read()
            yield "data: [DONE]\n\n"
        except grpc.RpcError as error:
            yield f"event: error\ndata: {as_error(from_rpc_error(error))}\n\n"
        except asyncio.CancelledError:
            if own_end():
                raise
        finally:
            call.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


async def picture(request: Request) -> Response:
    """The graph of a session as an SVG, as it is now."""
    tasks = (await (await begun("GetGraph", request))).tasks
    variables: list[Any] = []
    token: str | None = ""
    while token is not None:
        response = await (await begun("ListVariables", request, limit=1000, page_token=token))
        variables += response.variables
        token = response.next_page_token or None
    drawn = svg([decode(each, GraphTask) for each in tasks], [decode(each, VariableInfo) for each in variables])
    return Response(drawn, media_type="image/svg+xml", headers={"content-security-policy": "sandbox"})


async def page(request: Request) -> Response:
    """What a person sees."""
    nonce = secrets.token_urlsafe(16)
    allowed = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
    headers = {"content-security-policy": f"{allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
    return HTMLResponse(PAGE.read_text("utf-8").replace("NONCE", nonce), headers=headers)


async def begun(rpc: str, request: Request, **known: object) -> Any:
    """The call of the server that a request asks for."""
    return calling(rpc, request, await asked(rpc, request, known))


def calling(rpc: str, request: Request, message: Message) -> Any:
    """A call of the server for a request. It is cancelled if whoever asks goes away."""
    call = method_of(request.app.state.channel, rpc)(message, metadata=headers(request))
    leaving = asyncio.create_task(left(request))
    leaving.add_done_callback(lambda _: call.cancel())
    call.add_done_callback(lambda _: leaving.cancel())
    return call


def headers(request: Request) -> list[tuple[str, str]]:
    """Those of a request that the server is told."""
    given = [(name, request.headers.get(name, "")) for name in PASSED_ON]
    return [(name, value) for name, value in given if value.isascii() and value.isprintable() and value]


async def left(request: Request) -> None:
    """Return when nobody waits for the answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def asked(rpc: str, request: Request, known: dict[str, object]) -> Message:
    """The message that path, query and body make. Raises InvalidArgument for what cannot be one."""
    kind = GetMessageClass(METHODS[rpc].input_type)
    with_body = request.method in ("POST", "PUT")
    fields: dict[str, Any] = {**({} if with_body else request.query_params), **request.path_params, **known}
    for name, value in fields.items():
        field = kind.DESCRIPTOR.fields_by_name.get(name)
        if field is not None and field.type == field.TYPE_BOOL:
            fields[name] = {"true": True, "false": False}.get(value, value)
    data = await body(request) if with_body else b"{}"

    def read() -> Message:
        most = most_parts(kind.DESCRIPTOR) + SPARE_PARTS
        try:
            return json_format.ParseDict(loaded(data, most_values=most, most_parts=most) | fields, kind())
        except REFUSALS as error:
            told = str(error).partition("\n")[0] if isinstance(error, json_format.ParseError) else "is no JSON object"
            raise InvalidArgument.field("request", told) from error

    return await beside(request, len(data), read)


@functools.cache
def most_parts(kind: Descriptor) -> int:
    """How many texts, names, lists and objects the JSON of a message has at most, by the rules of its fields.

    Raises ValueError for a list whose limit only the server knows: no method of these routes has one.
    """
    parts = 1
    for field in kind.fields:
        rule = field.GetOptions().Extensions[rule_of]
        if rule.max_items_of:
            raise ValueError(f"{field.full_name} has no limit of its own")
        entries = rule.max_items if field.is_repeated else 1
        inside = 1 if field.message_type is None else most_parts(field.message_type)
        parts += 2 + entries * inside  # its name, and what is around its entries
    return parts


async def beside(request: Request, size: int, work: Callable[[], T]) -> T:
    """What reading a body of this size gives, without holding up others for long."""
    if size <= SMALL_BODY_BYTES:
        return work()
    async with request.app.state.reading:
        return await asyncio.to_thread(work)


async def body(request: Request) -> bytes:
    """All of it. HTTPException for one that is too large, or that a form of any page could send."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPException(415, "the body must not be compressed: content-encoding is not supported here")
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body must have up to {MAX_BODY_BYTES} bytes")
    return bytes(read)


def as_json(message: Message) -> str:
    """By the names that the contract has, with all fields but those that say whether they are set."""
    told = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(told, ensure_ascii=False)


def as_error(error: JaxctxError) -> str:
    """As JSON."""
    field = error.violations[0].field if error.violations else None
    told = {"message": error.message, "type": error.code.lower(), "code": error.reason, "param": field}
    return json.dumps({"error": told}, ensure_ascii=False)


def refused(error: JaxctxError) -> Response:
    """An error of the server."""
    retry = {} if error.retry_after_s is None else {"retry-after": str(math.ceil(error.retry_after_s))}
    return Response(as_error(error), STATUS.get(error.code, 500), retry, "application/json")


async def unserved(request: Request, error: Exception) -> Response:
    """An error of HTTP's own."""
    assert isinstance(error, HTTPException)
    return Response(error_of(error.status_code, error.detail), error.status_code, error.headers, "application/json")


async def broken(request: Request, error: Exception) -> Response:
    """A defect, which is logged."""
    return refused(Internal("internal error of the gateway"))


def configuration(application: ASGIApp, port: int, **settings: Any) -> uvicorn.Config:
    """How a gateway is served."""
    return uvicorn.Config(
        application,
        host="127.0.0.1",
        port=port,
        http=Protocol,
        ws="none",
        access_log=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **settings,
    )


def serve(application: Callable[[str], Starlette], doc: str) -> None:
    """The command of a gateway: serve until a signal."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", nargs="?", default=SERVER, help=f"HOST:PORT or unix:PATH (default: {SERVER})")
    parser.add_argument("--port", type=int, default=PORT, help=f"of 127.0.0.1 to listen on (default: {PORT})")
    chosen = parser.parse_args()
    server = uvicorn.Server(configuration(application(chosen.server), chosen.port))
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit("the gateway could not be started")


if __name__ == "__main__":
    serve(application, __doc__)
