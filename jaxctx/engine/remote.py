"""RemoteEngine: an engine in another process, called by the contract that its clients call.

It is called for any tenant, with the cluster's key. All calls are meant for one life of the process: where another one
answers at the same address they are refused.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx import answers
from jaxctx.codec import decode, encode
from jaxctx.engine.interface import Caller, CreateRequest, GenerateRequest, ProgramEngine, UpdateRequest
from jaxctx.errors import Unavailable
from jaxctx.v1 import admin_service_pb2, context_service_pb2, model_service_pb2
from jaxctx.v1.content_pb2 import TokenIds
from jaxctx.v1.services import METHODS
from jaxctx.wire import from_rpc_error

TENANT, LIFE = "jaxctx-tenant", "jaxctx-life"  # headers, see protos/jaxctx/v1/engine_service.proto
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),  # as servers send
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


def bearing(key: str) -> tuple[tuple[str, str], ...]:
    """The header that shows a key, if there is one."""
    return (("authorization", f"Bearer {key}"),) if key else ()


class RemoteEngine(ProgramEngine):
    """An engine that listens at `address`. Its `info` is there once it was asked for its `stats`."""

    def __init__(self, address: str, life: str, key: str, clock: Callable[[], float]) -> None:
        """`key` is the cluster's ("": none); `clock` is that of deadlines. `disconnect` at the end."""
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._headers = (*bearing(key), (LIFE, life))
        self._clock = clock
        self._calls: set[Any] = set()  # that are under way

    async def responses(self, method: MethodDescriptor, request: Message, caller: Caller) -> AsyncIterator[Any]:
        """What a method of the contract answers: one message, or a stream of them.

        Raises what the engine did; Unavailable (ENGINE_LOST) if it falls silent, which `stats` notices.
        """
        begin: Any = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        path = f"/{method.containing_service.full_name}/{method.name}"
        read = GetMessageClass(method.output_type).FromString
        timeout_s = None if caller.deadline is None else max(0.0, caller.deadline - self._clock())
        headers = (*self._headers, (TENANT, caller.tenant))
        call = begin(path, type(request).SerializeToString, read)(request, timeout=timeout_s, metadata=headers)
        self._calls.add(call)
        try:
            if method.server_streaming:
                async for response in call:
                    yield response
            else:
                yield await call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if call in self._calls:
                raise
            raise Unavailable("the engine does not answer", reason="ENGINE_LOST", retry_after_s=1.0) from None
        finally:
            self._calls.discard(call)
            call.cancel()

    async def ask(self, method: MethodDescriptor, request: Message, caller: Caller) -> Any:
        """The one message that a method answers."""
        async with aclosing(self.responses(method, request, caller)) as responses:  # type: ignore[type-var]
            return await anext(responses)

    async def stats(self) -> answers.EngineStats:
        """Its load. An engine that does not answer this answers nothing else: all calls end with that."""
        try:
            told = await self.ask(METHODS["GetStats"], admin_service_pb2.GetStatsRequest(), Caller())
        except BaseException:
            self._cut()
            raise
        engine = decode(told.engines[0], answers.Engine)
        self.info = engine.info
        return engine.stats

    async def create(self, caller: Caller, request: CreateRequest) -> answers.ContextInfo:
        new = encode(request, context_service_pb2.CreateContextRequest)
        return decode((await self.ask(METHODS["CreateContext"], new, caller)).context, answers.ContextInfo)

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> answers.FillResult:
        if not tokens:
            flush = context_service_pb2.FlushRequest(context_id=context_id)
            return decode(await self.ask(METHODS["Flush"], flush, caller), answers.FillResult)
        fill = context_service_pb2.FillRequest(context_id=context_id, tokens=TokenIds(ids=tokens), defer=defer)
        return decode(await self.ask(METHODS["Fill"], fill, caller), answers.FillResult)

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[answers.GeneratePiece]:
        wanted = encode(request, context_service_pb2.GenerateRequest)
        pieces: Any = self.responses(METHODS["Generate"], wanted, caller)
        async with aclosing(pieces):
            async for piece in pieces:
                yield decode(piece, answers.GeneratePiece)

    async def update(self, caller: Caller, context_id: str, request: UpdateRequest) -> answers.ContextInfo:
        changes = encode(request, context_service_pb2.UpdateContextRequest)
        changes.context_id = context_id
        return decode((await self.ask(METHODS["UpdateContext"], changes, caller)).context, answers.ContextInfo)

    async def close(self, caller: Caller, context_id: str) -> None:
        await self.ask(METHODS["CloseContext"], context_service_pb2.CloseContextRequest(context_id=context_id), caller)

    async def encode(self, text: str, start: bool) -> Sequence[int]:
        """Tokens of a text; with special ones, if it stands at the start of a sequence."""
        request = model_service_pb2.TokenizeRequest(text=text, add_special_tokens=start)
        told = await self.ask(METHODS["Tokenize"], request, Caller())
        return list(told.tokens)

    async def disconnect(self) -> None:
        """End all calls, and make no more."""
        self._cut()
        await self._channel.close()

    def _cut(self) -> None:
        calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()
