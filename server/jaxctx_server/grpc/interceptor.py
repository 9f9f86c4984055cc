"""Every call's way in and out: who calls, under which id, among how many; then the method; errors become statuses.

The request is received behind all that, and no method sees one that is not valid (`reading.py`): to gRPC every method
takes a stream, of which one message is read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias

import grpc

from jaxctx import rpc
from jaxctx.engine.remote import INCARNATION_HEADER, TENANT_HEADER
from jaxctx.errors import InvalidArgument, ResourceExhausted, Unavailable
from jaxctx_server.auth import LOCAL, METHODS, Key, Role
from jaxctx_server.grpc.request_reader import KINDS, RequestReader, of_others
from jaxctx_server.key_store import KeyStore
from jaxctx_server.logs import as_error

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
log = logging.getLogger("jaxctx.calls")
MAX_OPEN_CALLS = 64  # of methods that need no key
KEY: ContextVar[Key] = ContextVar("key")  # of whom the running method serves
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The only interceptor of the server."""

    def __init__(self, keys: KeyStore, max_calls: int, incarnation: str, reading: RequestReader) -> None:
        """`max_calls` at once, over all connections. Methods that need no key have a limit of their own, so that those
        who have none cannot use up the places of others. `incarnation` is that of this process, for its router.
        """
        self._keys, self._life, self._reading = keys, incarnation, reading
        # By whether the method is open to anyone.
        self._places_of_router = asyncio.Semaphore(max_calls)  # or others could make an engine look lost to its router
        self._places = {True: asyncio.Semaphore(MAX_OPEN_CALLS), False: asyncio.Semaphore(max_calls)}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler within the pipeline; None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrap(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        served: Any = handler  # whichever of its four behaviours there is

        async def valid(context: Context) -> Any:
            """The one request of a call."""
            if method in KINDS:
                return await self._reading.request(method, _caller(context), context.read)
            data = await context.read()
            if not isinstance(data, bytes):
                raise InvalidArgument.field("request", "must be one message")
            return of_others(served.request_deserializer, data)

        async def unary(requests: AsyncIterator[bytes], context: Context) -> object:
            async with self._call(method, context):
                return await served.unary_unary(await valid(context), context)

        async def stream(requests: AsyncIterator[bytes], context: Context) -> None:
            async with self._call(method, context):
                if handler.request_streaming:  # none of the contract's
                    parsed = (of_others(served.request_deserializer, each) async for each in requests)
                    responses = served.stream_stream(parsed, context)
                else:
                    responses = served.unary_stream(await valid(context), context)
                async with aclosing(responses):  # at once, if the caller goes away
                    async for response in responses:
                        await context.write(response)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)

    @asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[None]:
        """Around one call. Nothing of the request has been looked at before it is known that its caller may.

        One that may be made is a line of the log, at level DEBUG.
        """
        facts, key = {"method": method, "request_id": ""}, None
        started, outcome = time.monotonic(), "CANCELLED"
        try:
            known = key = self._keys.authorise(method, _header(context, "authorization"))
            places = self._places[METHODS[method] is Role.ANYONE]
            if key.role is Role.CLUSTER:
                key, incarnation = (
                    replace(key, tenant=_header(context, TENANT_HEADER) or key.tenant),
                    _header(context, INCARNATION_HEADER),
                )
                places = self._places_of_router if incarnation else places
                if incarnation not in (None, self._life):
                    message = "meant for an earlier incarnation of this engine"
                    raise Unavailable(message, reason="ENGINE_LOST", retry_after_s=1.0)
            KEY.set(key)
            given = _header(context, "x-request-id") or ""
            facts["request_id"] = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
            context.set_trailing_metadata((("x-request-id", facts["request_id"]),))
            if places.locked():
                raise ResourceExhausted("too many calls at once", reason="QUEUE_FULL", retry_after_s=1.0)
            async with places, self._keys.held(known):
                yield
            outcome = "OK"
        except grpc.aio.BaseError:
            raise  # the transport's: the caller is gone
        except Exception as error:
            told = as_error(error, facts)
            outcome, status = told.code, rpc.to_status(told)
            trailers = (*(context.trailing_metadata() or ()), *(status.trailing_metadata or ()))
            await context.abort(status.code, status.details, trailers)
        finally:
            if key is not None:
                seconds = round(time.monotonic() - started, 6)
                log.debug("call", extra=facts | {"caller": key.name, "code": outcome, "seconds": seconds})


def _caller(context: Context) -> tuple[str, ...]:
    """Whose budget a request is read by: without keys each connection has one."""
    key = KEY.get()
    return (context.peer() if key.name == LOCAL.name else key.name, key.tenant)


def _header(context: Context, name: str) -> str | None:
    """A request header; of several with one name, the first."""
    value = next((value for key, value in context.invocation_metadata() or () if key == name), None)
    return value if isinstance(value, str) else None
