"""RemoteEngine: an engine in another process, called by the contract that its clients call.

It is called for any tenant, with the cluster's key. All calls are meant for one incarnation of the process: where another one
answers at the same address they are refused.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from jaxctx.convert import decode, encode
from jaxctx.engine.interface import Caller, ProgramEngine
from jaxctx.errors import Unavailable
from jaxctx.rpc import CHANNEL_OPTIONS, from_rpc_error, method_of
from jaxctx.services import METHODS
from jaxctx.types import (
    ContextInfo,
    CreateContextRequest,
    EngineStats,
    EngineStatus,
    FillResult,
    GeneratePiece,
    GenerateRequest,
    UpdateContextRequest,
)

TENANT_HEADER, INCARNATION_HEADER = (
    "jaxctx-tenant",
    "jaxctx-incarnation",
)  # headers, see protos/jaxctx/v1/engine_service.proto
ENGINE_CHANNEL_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_http_proxy", 0)]
SILENCE_S = 3.0  # without an answer, after which an engine is taken for lost
engine_lost = partial(Unavailable, "the engine does not answer", reason="ENGINE_LOST", retry_after_s=1.0)


def authorization_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """The header that shows a key, if there is one."""
    return (("authorization", f"Bearer {key}"),) if key else ()


class RemoteEngine(ProgramEngine):
    """An engine that listens at `address`. Its `info` is there once it was asked for its `stats`."""

    def __init__(
        self, address: str, incarnation: str, key: str, clock: Callable[[], float], silence_s: float = SILENCE_S
    ) -> None:
        """`key` is the cluster's ("": none); `clock` is that of deadlines; one that has not told its load for
        `silence_s` is taken for lost. `aclose` at the end.
        """
        self._channel = grpc.aio.insecure_channel(address, options=ENGINE_CHANNEL_OPTIONS)
        self._headers = (*authorization_metadata(key), (INCARNATION_HEADER, incarnation))
        self._clock, self._silence_s = clock, silence_s
        self._calls: set[Any] = set()  # that are under way
        self._is_gone = False

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> FillResult:
        rpc, added = ("Fill", {"tokens": {"ids": tokens}, "defer": defer}) if tokens else ("Flush", {})
        return decode(await self.ask(rpc, caller, context_id=context_id, **added), FillResult)

    async def stats(self) -> EngineStats:
        """Its load. An engine that does not answer this answers nothing else: all calls end with that."""
        try:
            told = await self.ask("GetStats", Caller(deadline=self._clock() + self._silence_s))
        except BaseException:
            self._cut()
            raise
        engine = decode(told.engines[0], EngineStatus)
        self.info = engine.info
        return engine.stats

    async def encode(self, text: str, start: bool) -> Sequence[int]:
        """Tokens of a text; with special ones, if it stands at the start of a sequence."""
        return list((await self.ask("Tokenize", Caller(), text=text, add_special_tokens=start)).tokens)

    async def create(self, caller: Caller, request: CreateContextRequest) -> ContextInfo:
        told = await self.ask("CreateContext", caller, request)
        return decode(told.context, ContextInfo)

    async def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> ContextInfo:
        told = await self.ask("UpdateContext", caller, request, context_id=context_id)
        return decode(told.context, ContextInfo)

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        told = await self.ask("Rewind", caller, context_id=context_id, to=to)
        return decode(told.context, ContextInfo)

    async def close(self, caller: Caller, context_id: str) -> None:
        await self.ask("CloseContext", caller, context_id=context_id)

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        async with self.begun("Generate", caller, request) as call:
            async for each in call:
                yield decode(each, GeneratePiece)

    async def clear_cache(self, caller: Caller) -> int:
        told = await self.ask("ClearCache", caller)
        return int(told.pages_dropped)

    async def aclose(self) -> None:
        """End all calls, and make no more."""
        self._is_gone = True
        self._cut()
        await self._channel.close()

    def _cut(self) -> None:
        calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()

    async def ask(self, rpc: str, caller: Caller, request: object = None, /, **fields: Any) -> Any:
        """The response of a method of the contract that has one."""
        async with self.begun(rpc, caller, request, **fields) as call:
            return await call

    @asynccontextmanager
    async def begun(self, rpc: str, caller: Caller, request: object = None, /, **fields: Any) -> AsyncIterator[Any]:
        """A call of the contract, which ends with the block. What the engine raises is raised in it; Unavailable
        (ENGINE_LOST) if the engine falls silent.
        """
        if self._is_gone:
            raise engine_lost()
        timeout_s = None if caller.deadline is None else max(0.0, caller.deadline - self._clock())
        headers = (*self._headers, (TENANT_HEADER, caller.tenant))
        kind = GetMessageClass(METHODS[rpc].input_type)
        message = kind(**fields) if request is None else encode(request, kind, **fields)
        call = method_of(self._channel, rpc)(message, timeout=timeout_s, metadata=headers)
        self._calls.add(call)
        try:
            yield call
        except grpc.RpcError as error:
            told = from_rpc_error(error)
            raise (
                engine_lost() if told.reason == "NOT_SERVING" else told
            ) from error  # what gRPC says of who is not there
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call in self._calls or (task is not None and task.cancelling()):  # its caller was, and not only the call
                raise
            raise engine_lost() from None
        finally:
            self._calls.discard(call)
            call.cancel()
