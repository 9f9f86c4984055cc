"""The channel and stubs of an asyncio client, and how it calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import grpc
import grpc.aio

from jaxctx.client.link import CHANNEL_OPTIONS, CallDefaults
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceStub
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub
from jaxctx.v1.snapshot_service_pb2_grpc import SnapshotServiceStub
from jaxctx.wire import from_rpc_error

if TYPE_CHECKING:  # names of the type stubs only
    from jaxctx.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from jaxctx.v1.context_service_pb2_grpc import ContextServiceAsyncStub
    from jaxctx.v1.model_service_pb2_grpc import ModelServiceAsyncStub
    from jaxctx.v1.snapshot_service_pb2_grpc import SnapshotServiceAsyncStub

Q = TypeVar("Q")
A = TypeVar("A")


class Listed(Protocol):
    """A part of a list."""

    @property
    def next_page_token(self) -> str: ...


L = TypeVar("L", bound=Listed)


class Connection:
    """One channel to a server, of the running event loop. Opens lazily; lives until `close`."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, defaults: CallDefaults) -> None:
        self.defaults = defaults
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self.contexts = cast("ContextServiceAsyncStub", ContextServiceStub(self.channel))
        self.snapshots = cast("SnapshotServiceAsyncStub", SnapshotServiceStub(self.channel))
        self.models = cast("ModelServiceAsyncStub", ModelServiceStub(self.channel))
        self.admin = cast("AdminServiceAsyncStub", AdminServiceStub(self.channel))

    async def close(self) -> None:
        """Calls under way end with Cancelled."""
        await self.channel.close()

    async def call(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, A], request: Q, timeout_s: float | None) -> A:
        """Call a method of a stub with the client's key and deadline. Raises the errors of `jaxctx.errors`."""
        try:
            return await method(request, timeout=self.defaults.timeout(timeout_s), metadata=self.defaults.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def stream(
        self, method: grpc.aio.UnaryStreamMultiCallable[Q, A], request: Q, timeout_s: float | None
    ) -> grpc.aio.UnaryStreamCall[Q, A]:
        """Begin a streaming call."""
        return method(request, timeout=self.defaults.timeout(timeout_s), metadata=self.defaults.metadata)

    async def pages(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Q, L], request: Q, timeout_s: float | None
    ) -> AsyncIterator[L]:
        """The parts of a list, one after the other."""
        while True:
            response = await self.call(method, request, timeout_s)
            yield response
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token  # type: ignore[attr-defined]

    async def events(
        self, method: grpc.aio.UnaryStreamMultiCallable[Q, A], request: Q, timeout_s: float | None
    ) -> AsyncIterator[A]:
        """What a call tells until whoever iterates leaves. Without a deadline, unless one is given."""
        call = method(request, timeout=timeout_s, metadata=self.defaults.metadata)
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
