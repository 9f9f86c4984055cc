"""The gRPC server to which requests go: its stubs, and calls that end with the client that made the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from starlette.requests import ClientDisconnect, Request

from jaxctx.rpc import CHANNEL_OPTIONS
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from jaxctx_server.http.request_body import BodyParser

if TYPE_CHECKING:
    from jaxctx.v1.context_service_pb2_grpc import ContextServiceAsyncStub
    from jaxctx.v1.model_service_pb2_grpc import ModelServiceAsyncStub
    from jaxctx.v1.session_service_pb2_grpc import SessionServiceAsyncStub

FORWARDED_HEADERS = ("authorization", "x-request-id")

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class Backend:
    """The objects that all requests share: the stubs of one channel, and tasks that outlast their request."""

    contexts: ContextServiceAsyncStub
    models: ModelServiceAsyncStub
    sessions: SessionServiceAsyncStub
    body_parser: BodyParser = field(default_factory=BodyParser)
    background_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    logged_fields: set[str] = field(default_factory=set)
    """Names of unknown fields that were logged; each is logged once."""


@asynccontextmanager
async def connect(server: str) -> AsyncIterator[Backend]:
    """A channel to a server, "host:port" or "unix:/path", for as long as the context lasts."""
    async with grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS) as channel:
        # The stubs of an asyncio channel have asyncio methods; only the annotations know two classes.
        yield Backend(
            cast("ContextServiceAsyncStub", ContextServiceStub(channel)),
            cast("ModelServiceAsyncStub", ModelServiceStub(channel)),
            cast("SessionServiceAsyncStub", SessionServiceStub(channel)),
        )


def backend_of(request: Request) -> Backend:
    """The backend of the application that serves this request."""
    return cast(Backend, request.app.state.backend)


def forwarded_headers(request: Request) -> list[tuple[str, str]]:
    """Headers of the request that its calls carry as metadata; values that gRPC could not send are left out."""
    metadata = []
    for name in FORWARDED_HEADERS:
        value = request.headers.get(name, "")
        if value and value.isascii() and value.isprintable():
            metadata.append((name, value))
    return metadata


async def call_unary(
    request: Request, method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT], message: RequestT
) -> ResponseT:
    """The response of a call. Raises grpc.RpcError, and ClientDisconnect if the client leaves first."""
    call = method(message, metadata=forwarded_headers(request))
    cancel_on_disconnect(request, call)
    try:
        return await call
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise ClientDisconnect from None


def call_stream(
    request: Request, method: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT], message: RequestT
) -> grpc.aio.UnaryStreamCall[RequestT, ResponseT]:
    """A streaming call, which is cancelled when the client leaves. Read it with `read_stream`."""
    call = method(message, metadata=forwarded_headers(request))
    cancel_on_disconnect(request, call)
    return call


async def read_stream(call: grpc.aio.UnaryStreamCall[RequestT, ResponseT]) -> ResponseT | None:
    """The next response of a call, None at its end. Raises as `call_unary`."""
    try:
        response = await call.read()
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise ClientDisconnect from None
    return None if response is grpc.aio.EOF else cast(ResponseT, response)


def cancel_on_disconnect(request: Request, call: Any) -> None:
    """Cancel a call of gRPC when the client of the request is gone."""
    waiting = asyncio.create_task(wait_for_disconnect(request))
    waiting.add_done_callback(lambda _: call.cancel())
    call.add_done_callback(lambda _: waiting.cancel())


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def is_task_cancelled() -> bool:
    """Whether a CancelledError is that of the running task, and not that of a call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
