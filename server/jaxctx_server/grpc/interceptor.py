"""The gRPC side of the call pipeline: around every method of the server, the contract's and gRPC's own.

The request is received within the pipeline, so that nothing of it is read before its caller is known. For that every
method is registered as one that takes a stream, of which one message is read as bytes. Errors become statuses with
trailers (`jaxctx.rpc.to_status`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from jaxctx import rpc
from jaxctx.engine.remote import INCARNATION_HEADER, TENANT_HEADER, TRACEPARENT_HEADER
from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx_server.grpc.caller import CURRENT_KEY, Context
from jaxctx_server.metrics.calls import GRPC
from jaxctx_server.service.pipeline import Call, CallMetadata, CallPipeline
from jaxctx_server.service.request_reader import NOT_ONE_MESSAGE, REQUEST_TYPES
from jaxctx_server.validate.scan import NO_MESSAGE

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MAX_FOREIGN_BYTES = 1 << 16  # of a message of gRPC's own services, which have no rules
REQUEST_ID_HEADER = "x-request-id"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The only interceptor of the server."""

    def __init__(self, pipeline: CallPipeline) -> None:
        self._pipeline = pipeline

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler within the pipeline; None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = InterceptedMethod(handler_call_details.method, handler, self._pipeline)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(method.call_stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(method.call_unary, None, handler.response_serializer)


class InterceptedMethod:
    """One method of a servicer within the pipeline."""

    def __init__(self, name: str, handler: Handler, pipeline: CallPipeline) -> None:
        self._name = name
        self._handler: Any = handler  # has whichever of the four behaviours the method is of
        self._pipeline = pipeline

    async def call_unary(self, requests: AsyncIterator[bytes], context: Context) -> object:
        """The response of a method that has one."""
        async with self._admitted(context) as call:
            request = await self._read_request(call, context)
            return await self._handler.unary_unary(request, context)

    async def call_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Write the responses of a method that streams them. Its generator is closed at once if the caller leaves."""
        async with self._admitted(context) as call:
            if self._handler.request_streaming:  # none of the contract's
                responses = self._handler.stream_stream(self._parsed(requests), context)
            else:
                request = await self._read_request(call, context)
                responses = self._handler.unary_stream(request, context)
            async with aclosing(responses):
                async for response in responses:
                    await context.write(response)

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[Call]:
        """While entered, a call runs in the pipeline: with the caller's key, and with errors turned into statuses."""
        call = Call(call_metadata(self._name, context))
        try:
            async with self._pipeline.admit(call, transport_errors=(grpc.aio.BaseError,)):
                CURRENT_KEY.set(call.key)
                context.set_trailing_metadata(request_id_trailers(call))
                yield call
        except JaxctxError as error:
            status = rpc.to_status(error)
            trailers = (*request_id_trailers(call), *(status.trailing_metadata or ()))
            await context.abort(status.code, status.details, trailers)

    async def _read_request(self, call: Call, context: Context) -> Any:
        """The one request of a call; of the contract's methods it is valid. Raises InvalidArgument."""
        if self._name in REQUEST_TYPES:
            return await self._pipeline.read_request(call, context.read)
        data = await context.read()
        if not isinstance(data, bytes):
            raise InvalidArgument.field("request", NOT_ONE_MESSAGE)
        return parse_foreign(self._handler.request_deserializer, data)

    async def _parsed(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        """The messages of a stream of requests, of a service that is not the contract's."""
        async for data in requests:
            yield parse_foreign(self._handler.request_deserializer, data)


def parse_foreign(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """A message of a service that is not the contract's. Raises InvalidArgument for a large one or none."""
    if len(data) > MAX_FOREIGN_BYTES:
        raise InvalidArgument.field("request", f"must be a message of up to {MAX_FOREIGN_BYTES} bytes")
    try:
        return parse(data)
    except DecodeError:
        raise InvalidArgument.field("request", NO_MESSAGE) from None


def call_metadata(method: str, context: Context) -> CallMetadata:
    """The properties of a call that its headers and the connection have."""
    return CallMetadata(
        method=method,
        peer=context.peer(),
        authorization=header(context, "authorization"),
        request_id=header(context, REQUEST_ID_HEADER),
        tenant=header(context, TENANT_HEADER),
        incarnation=header(context, INCARNATION_HEADER),
        traceparent=header(context, TRACEPARENT_HEADER),
        transport=GRPC,
    )


def request_id_trailers(call: Call) -> tuple[tuple[str, str], ...]:
    """The trailer that returns the request id."""
    return ((REQUEST_ID_HEADER, call.request_id),)


def header(context: Context, name: str) -> str | None:
    """A request header; of several with one name, the first. None: not sent, or not text."""
    value = next((value for key, value in context.invocation_metadata() or () if key == name), None)
    return value if isinstance(value, str) else None
