"""Every call's way in and out: the stages in one order, then the method; whatever is raised becomes a status.

Stages are asynchronous context managers around the rest of the call, entered in the order given. A new concern (traces,
metrics) is one more of them. The request is parsed behind them, so bytes that are no message are an error like others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from jaxctx import wire
from jaxctx.engine.interface import Caller
from jaxctx.errors import InvalidArgument
from jaxctx_server.access import NOBODY, Principal
from jaxctx_server.incident import as_error

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(slots=True)
class Call:
    """One call on its way through the stages, which fill in what they find out."""

    method: str  # "/jaxctx.v1.ContextService/Fill"
    context: Context
    principal: Principal = NOBODY
    request_id: str = ""

    def header(self, name: str) -> str | None:
        """A request header; of several with one name, the first."""
        for key, value in self.context.invocation_metadata() or ():
            if key == name:
                return value if isinstance(value, str) else None
        return None

    def add_trailer(self, name: str, value: str) -> None:
        """Send a header at the end of the call, however it ends."""
        self.context.set_trailing_metadata((*_trailers(self.context), (name, value)))


Stage = Callable[[Call], AbstractAsyncContextManager[None]]
_CALL: ContextVar[Call] = ContextVar("call")


def current_call() -> Call:
    """The call that the running method serves."""
    return _CALL.get()


def caller(context: Context, clock: Callable[[], float]) -> Caller:
    """Whose namespace the running method works in, and until when; `clock` is the one of the engine's deadlines."""
    remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
    deadline = None if remaining_s is None else clock() + remaining_s
    return Caller(tenant=current_call().principal.tenant, deadline=deadline)


class Pipeline(grpc.aio.ServerInterceptor):
    """The only interceptor of the server."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler within the stages; None for a method that does not exist."""
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: Handler) -> Handler:
        served: Any = handler  # whichever of its four behaviours there is
        parse = served.request_deserializer

        async def unary(data: bytes, context: Context) -> object:
            async with self._call(method, context):
                return await served.unary_unary(_parsed(parse, data), context)

        async def stream(data: bytes, context: Context) -> None:
            async with self._call(method, context):
                await _send(served.unary_stream(_parsed(parse, data), context), context)

        async def both(requests: AsyncIterator[bytes], context: Context) -> None:
            async with self._call(method, context):
                parsed = (_parsed(parse, data) async for data in requests)
                await _send(served.stream_stream(parsed, context), context)

        if handler.request_streaming:
            return _handler(both, handler, grpc.stream_stream_rpc_method_handler)
        if handler.response_streaming:
            return _handler(stream, handler, grpc.unary_stream_rpc_method_handler)
        return _handler(unary, handler, grpc.unary_unary_rpc_method_handler)

    @asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[None]:
        """Around one call: stages inside, the translation of errors outside."""
        call = Call(method, context)
        token = _CALL.set(call)
        try:
            async with AsyncExitStack() as stages:
                for stage in self._stages:
                    await stages.enter_async_context(stage(call))
                yield
        except grpc.aio.BaseError:
            raise  # the transport's: the caller is gone
        except Exception as error:
            status = wire.to_status(as_error(error, method=method, request_id=call.request_id))
            trailers = (*_trailers(context), *(status.trailing_metadata or ()))
            await context.abort(status.code, status.details, trailers)
        finally:
            _CALL.reset(token)


def _handler(behaviour: Any, handler: Handler, make: Callable[..., Handler]) -> Handler:
    """With the bytes of the request left to `behaviour`."""
    return make(behaviour, request_deserializer=None, response_serializer=handler.response_serializer)


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        raise InvalidArgument.field("request", "is no such message, or has text that is not UTF-8") from None


async def _send(responses: Any, context: Context) -> None:
    """Write what a streaming method yields. Its generator is closed at once if the caller goes away."""
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)


def _trailers(context: Context) -> Metadata:
    return tuple(context.trailing_metadata() or ())
