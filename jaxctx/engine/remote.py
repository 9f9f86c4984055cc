"""RemoteEngine: an engine in another process, called through the same gRPC services that its clients call.

Calls are made in the name of any tenant, with the cluster's key. They are meant for one incarnation of the process:
another one that answers at the same address refuses them. Every call may raise the errors of `jaxctx.errors`, and
Unavailable (ENGINE_LOST) if the engine does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from jaxctx import convert
from jaxctx.engine.interface import Caller, ProgramEngine
from jaxctx.errors import InvalidArgument, JaxctxError, Unavailable
from jaxctx.rpc import CHANNEL_OPTIONS, from_rpc_error
from jaxctx.types import (
    AdapterInfo,
    Attention,
    ContextInfo,
    CreateContextRequest,
    EngineStats,
    FillResult,
    GeneratePiece,
    GenerateRequest,
    GetContextResult,
    OpenRequest,
    SaveRequest,
    Snapshot,
    UpdateContextRequest,
)
from jaxctx.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    content_pb2,
    context_service_pb2,
    context_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    rules_pb2,
    snapshot_service_pb2,
    snapshot_service_pb2_grpc,
)

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
# Makes the credentials of a channel between servers: the same object until they are renewed, then another one.
MakeCredentials: TypeAlias = Callable[[], grpc.ChannelCredentials]

# Headers: see protos/jaxctx/v1/engine_service.proto.
TENANT_HEADER = "jaxctx-tenant"
INCARNATION_HEADER = "jaxctx-incarnation"
TRACEPARENT_HEADER = "traceparent"  # W3C trace context

ENGINE_CHANNEL_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_http_proxy", 0)]
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)  # channels to one address share a connection otherwise
SILENCE_S = 3.0  # without an answer, after which an engine is taken for lost
_TEXT_FIELD = model_service_pb2.TokenizeRequest.DESCRIPTOR.fields_by_name["text"]
MAX_TEXT_BYTES: int = _TEXT_FIELD.GetOptions().Extensions[rules_pb2.rule].max_bytes  # an engine tokenises so many


def engine_lost() -> Unavailable:
    """The error of all calls to an engine that does not answer."""
    return Unavailable("the engine does not answer", reason="ENGINE_LOST", retry_after_s=1.0)


def authorization_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """The header that shows a key; no header for the empty key."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def engine_channel(
    address: str, credentials: grpc.ChannelCredentials | None, *more_options: tuple[str, int]
) -> grpc.aio.Channel:
    """A channel between servers of a cluster. `credentials` None: without TLS."""
    options = [*ENGINE_CHANNEL_OPTIONS, *more_options]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


class RemoteEngine(ProgramEngine):
    """An engine that listens at `address`. `info` and `attention_status` are known once it was asked for its `stats`.

    Its stubs (`contexts`, `snapshots`, `models`, `admin`) are for frontends that pass messages on as they are:
    `await engine.call(engine.contexts.Plan, caller, request)`.
    """

    def __init__(
        self,
        address: str,
        incarnation: str,
        key: str,
        clock: Callable[[], float],
        silence_s: float = SILENCE_S,
        credentials: MakeCredentials | None = None,
    ) -> None:
        """`key` is the cluster's (empty: none), `clock` the one of callers' deadlines. `credentials` None: without TLS.

        A gRPC channel keeps its credentials. When it cannot be connected again with them, as after a change of roots,
        and they have been renewed, `stats` makes a new one.

        `stats` takes `silence_s` at most. Call `aclose` at the end.
        """
        self.attention_status: Attention | None = None
        self.incarnation = incarnation  # of the engine's process
        self._address = address
        self._make_credentials = credentials
        self._credentials = None if credentials is None else credentials()
        self._make_channels()
        self._replaced: list[tuple[grpc.aio.Channel, frozenset[Any]]] = []  # channels, each with the calls on it
        self._headers = (*authorization_metadata(key), (INCARNATION_HEADER, incarnation))
        self._clock = clock
        self._silence_s = silence_s
        self._adapter_revisions: Mapping[str, str] = {}
        self._calls: set[Any] = set()  # calls under way
        self._is_gone = False

    def _make_channels(self) -> None:
        """Make the channels with the credentials, and their stubs. They connect when they are used."""
        self._channel = engine_channel(self._address, self._credentials)
        self.contexts = context_service_pb2_grpc.ContextServiceStub(self._channel)
        self.snapshots = snapshot_service_pb2_grpc.SnapshotServiceStub(self._channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self._channel)
        # A connection has as many streams as its server takes calls (--max-calls). Heartbeats have a connection of
        # their own, or they would wait for one of those calls to end, and the engine would look lost.
        self._heartbeat_channel = engine_channel(self._address, self._credentials, OWN_CONNECTION)
        self._heartbeats = admin_service_pb2_grpc.AdminServiceStub(self._heartbeat_channel)

    # --- The engine and its model

    @property
    def adapter_revisions(self) -> Mapping[str, str]:
        """See `ProgramEngine`."""
        return self._adapter_revisions

    async def stats(self) -> EngineStats:
        """Load and memory now. Other calls go on whatever becomes of this one: see `end_calls`.

        Raises Unavailable (ENGINE_LOST) also if the connection of other calls cannot be made.
        """
        await self._close_replaced()
        caller = Caller(deadline=self._clock() + self._silence_s)
        credentials = self._credentials
        try:
            response = await self._ask_for_stats(caller)
        except JaxctxError:
            self._take_renewed_credentials()
            if self._credentials is credentials:
                raise
            response = await self._ask_for_stats(caller)
        engine = convert.engine_status_from_proto(response.engines[0])
        self.info = engine.info
        self._adapter_revisions = engine.adapters
        self.attention_status = engine.attention
        return engine.stats

    async def _ask_for_stats(self, caller: Caller) -> admin_service_pb2.GetStatsResponse:
        """The engine's load, if calls to it can be made."""
        if self._is_gone:
            raise engine_lost()
        self._channel.get_state(try_to_connect=True)  # or it would stay unconnected until the next call
        response = await self.call(self._heartbeats.GetStats, caller, admin_service_pb2.GetStatsRequest())
        if self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise engine_lost()
        return response

    async def clear_cache(self, caller: Caller) -> int:
        response = await self.call(self.admin.ClearCache, caller, admin_service_pb2.ClearCacheRequest())
        return response.pages_dropped

    async def load_adapter(self, caller: Caller, name: str, directory: str) -> AdapterInfo:
        request = admin_service_pb2.LoadAdapterRequest(name=name, directory=directory)
        response = await self.call(self.admin.LoadAdapter, caller, request)
        return convert.adapter_from_proto(response.adapter)

    async def unload_adapter(self, caller: Caller, name: str) -> AdapterInfo:
        request = admin_service_pb2.UnloadAdapterRequest(name=name)
        response = await self.call(self.admin.UnloadAdapter, caller, request)
        return convert.adapter_from_proto(response.adapter)

    async def adapters(self, caller: Caller) -> Sequence[AdapterInfo]:
        response = await self.call(self.admin.ListAdapters, caller, admin_service_pb2.ListAdaptersRequest())
        return [convert.adapter_from_proto(adapter) for adapter in response.adapters]

    async def encode(self, caller: Caller, text: str, start: bool) -> Sequence[int]:
        """Token ids of a text; with the special tokens of a sequence's beginning if it stands at the `start`.

        Raises InvalidArgument for a text that is too long for a message between servers. It is not sent in parts: these
        may have other tokens than the whole.
        """
        size_bytes = len(text.encode())
        if size_bytes > MAX_TEXT_BYTES:
            limit = f"must have up to {MAX_TEXT_BYTES} bytes behind a router, not {size_bytes}"
            raise InvalidArgument.field("prompt", limit)
        request = model_service_pb2.TokenizeRequest(text=text, add_special_tokens=start)
        response = await self.call(self.models.Tokenize, caller, request)
        return list(response.tokens)

    # --- Contexts

    async def create(self, caller: Caller, request: CreateContextRequest) -> ContextInfo:
        message = convert.create_context_request_to_proto(request)
        response = await self.call(self.contexts.CreateContext, caller, message)
        return convert.context_info_from_proto(response.context)

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> FillResult:
        if not tokens:
            flush_request = context_service_pb2.FlushRequest(context_id=context_id)
            flush_response = await self.call(self.contexts.Flush, caller, flush_request)
            return convert.flush_response_from_proto(flush_response)
        request = context_service_pb2.FillRequest(
            context_id=context_id, tokens=content_pb2.TokenIds(ids=tokens), defer=defer
        )
        return convert.fill_result_from_proto(await self.call(self.contexts.Fill, caller, request))

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        message = convert.generate_request_to_proto(request)
        async with self.started(self.contexts.Generate, caller, message) as call:
            async for response in call:
                yield convert.generate_piece_from_proto(response)

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        request = context_service_pb2.RewindRequest(context_id=context_id, to=to)
        response = await self.call(self.contexts.Rewind, caller, request)
        return convert.context_info_from_proto(response.context)

    async def switch_adapter(self, caller: Caller, context_id: str, adapter: str) -> ContextInfo:
        request = context_service_pb2.SwitchAdapterRequest(context_id=context_id, adapter=adapter)
        response = await self.call(self.contexts.SwitchAdapter, caller, request)
        return convert.context_info_from_proto(response.context)

    async def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> ContextInfo:
        message = convert.update_context_request_to_proto(request, context_id=context_id)
        response = await self.call(self.contexts.UpdateContext, caller, message)
        return convert.context_info_from_proto(response.context)

    async def inspect(
        self,
        caller: Caller,
        context_id: str,
        include_pages: bool = False,
        include_tokens: bool = False,
        include_ancestors: bool = False,
    ) -> GetContextResult:
        """One context, with the details that are requested."""
        request = context_service_pb2.GetContextRequest(
            context_id=context_id,
            include_pages=include_pages,
            include_tokens=include_tokens,
            include_ancestors=include_ancestors,
        )
        return convert.get_context_result_from_proto(await self.call(self.contexts.GetContext, caller, request))

    async def list(
        self, caller: Caller, page_token: str, limit: int, include_program_contexts: bool = False
    ) -> Sequence[ContextInfo]:
        """Up to `limit` contexts of the caller's with ids after `page_token`, in the order of the ids."""
        request = context_service_pb2.ListContextsRequest(
            page_token=page_token, limit=limit, include_program_contexts=include_program_contexts
        )
        response = await self.call(self.contexts.ListContexts, caller, request)
        return [convert.context_info_from_proto(context) for context in response.contexts]

    async def close(self, caller: Caller, context_id: str) -> None:
        request = context_service_pb2.CloseContextRequest(context_id=context_id)
        await self.call(self.contexts.CloseContext, caller, request)

    # --- Snapshots

    async def save(self, caller: Caller, request: SaveRequest) -> Snapshot:
        """Save a context's present state as a snapshot."""
        response = await self.call(self.snapshots.Save, caller, convert.save_request_to_proto(request))
        return convert.snapshot_from_proto(response.snapshot)

    async def take(self, caller: Caller, request: OpenRequest) -> FillResult:
        """Open the latest version of a snapshot as a new context, and delete the snapshot."""
        message = convert.take_request_to_proto(request)
        return convert.take_response_from_proto(await self.call(self.snapshots.Take, caller, message))

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        """Delete one version of a name (None: all of them). Returns how many versions were deleted."""
        request = snapshot_service_pb2.DeleteSnapshotRequest(name=name, version=version)
        response = await self.call(self.snapshots.DeleteSnapshot, caller, request)
        return response.versions_deleted

    # --- How calls are made

    async def aclose(self) -> None:
        """End all calls, and make no more."""
        self._is_gone = True
        self.end_calls()
        for channel in (self._channel, self._heartbeat_channel):
            await channel.close()
        await self._close_replaced()

    def _take_renewed_credentials(self) -> None:
        """Make new channels if the credentials have been renewed. Calls under way go on over those before."""
        if self._make_credentials is None or self._is_gone:
            return
        credentials = self._make_credentials()
        if credentials is self._credentials:
            return
        self._credentials = credentials
        self._replaced += [(self._channel, frozenset(self._calls)), (self._heartbeat_channel, frozenset())]
        self._make_channels()

    async def _close_replaced(self) -> None:
        """Close the channels that have been replaced and have no calls under way any more."""
        unused = [channel for channel, calls in self._replaced if calls.isdisjoint(self._calls)]
        self._replaced = [each for each in self._replaced if each[0] not in unused]
        for channel in unused:
            await channel.close()

    def end_calls(self) -> None:
        """End all calls under way, which then raise Unavailable (ENGINE_LOST): the engine is taken for lost."""
        calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()

    async def call(
        self, method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT], caller: Caller, request: RequestT
    ) -> ResponseT:
        """The response of a stub's method to this message."""
        async with self.started(method, caller, request) as call:
            response: ResponseT = await call
            return response

    @asynccontextmanager
    async def started(self, method: Any, caller: Caller, request: Message) -> AsyncIterator[Any]:
        """A started call of a stub's method, which ends with the `async with` block.

        The engine's errors are raised in the block; Unavailable (ENGINE_LOST) if the engine falls silent.
        """
        if self._is_gone:
            raise engine_lost()
        timeout_s = None if caller.deadline is None else max(0.0, caller.deadline - self._clock())
        headers = (*self._headers, (TENANT_HEADER, caller.tenant))
        if caller.traceparent:
            headers = (*headers, (TRACEPARENT_HEADER, caller.traceparent))
        call = method(request, timeout=timeout_s, metadata=headers)
        self._calls.add(call)
        try:
            yield call
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if error.reason == "NOT_SERVING":  # gRPC's own answer for a process that is not there
                error = engine_lost()
            raise error from rpc_error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            caller_was_cancelled = task is not None and task.cancelling() > 0
            if call in self._calls or caller_was_cancelled:  # not `end_calls`, or not `end_calls` alone
                raise
            raise engine_lost() from None
        finally:
            self._calls.discard(call)
            call.cancel()


# Which method of an engine's stubs is called, once the engine is chosen: `lambda engine: engine.contexts.Fill`.
StubMethod: TypeAlias = Callable[[RemoteEngine], "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]"]
# The same for a method that streams its responses: `lambda engine: engine.contexts.Generate`.
StubStreamMethod: TypeAlias = Callable[[RemoteEngine], "grpc.UnaryStreamMultiCallable[RequestT, ResponseT]"]
