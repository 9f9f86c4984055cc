"""The channel and stubs of a blocking client, and how it calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

import grpc

from jaxctx.client.link import CHANNEL_OPTIONS, CallDefaults
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceStub
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub
from jaxctx.v1.snapshot_service_pb2_grpc import SnapshotServiceStub
from jaxctx.wire import from_rpc_error

Q = TypeVar("Q")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Responses(Protocol[A_co]):
    """A streaming call."""

    def __next__(self) -> A_co: ...

    def cancel(self) -> object: ...


class Listed(Protocol):
    """A part of a list."""

    @property
    def next_page_token(self) -> str: ...


L = TypeVar("L", bound=Listed)


class Connection:
    """One channel to a server. Opens lazily; lives until `close`."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, defaults: CallDefaults) -> None:
        self.defaults = defaults
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self.channel = grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self.contexts: ContextServiceStub = ContextServiceStub(self.channel)
        self.snapshots: SnapshotServiceStub = SnapshotServiceStub(self.channel)
        self.models: ModelServiceStub = ModelServiceStub(self.channel)
        self.admin: AdminServiceStub = AdminServiceStub(self.channel)

    def close(self) -> None:
        """Calls under way end with Cancelled."""
        self.channel.close()

    def call(self, method: grpc.UnaryUnaryMultiCallable[Q, A], request: Q, timeout_s: float | None) -> A:
        """Call a method of a stub with the client's key and deadline. Raises the errors of `jaxctx.errors`."""
        try:
            return method(request, timeout=self.defaults.timeout(timeout_s), metadata=self.defaults.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def stream(self, method: grpc.UnaryStreamMultiCallable[Q, A], request: Q, timeout_s: float | None) -> Responses[A]:
        """Begin a streaming call."""
        return method(request, timeout=self.defaults.timeout(timeout_s), metadata=self.defaults.metadata)

    def pages(self, method: grpc.UnaryUnaryMultiCallable[Q, L], request: Q, timeout_s: float | None) -> Iterator[L]:
        """The parts of a list, one after the other."""
        while True:
            response = self.call(method, request, timeout_s)
            yield response
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token  # type: ignore[attr-defined]

    def events(self, method: grpc.UnaryStreamMultiCallable[Q, A], request: Q, timeout_s: float | None) -> Iterator[A]:
        """What a call tells until whoever iterates leaves. Without a deadline, unless one is given."""
        call = method(request, timeout=timeout_s, metadata=self.defaults.metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
