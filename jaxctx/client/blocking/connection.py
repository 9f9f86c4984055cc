"""The channel and stubs of a blocking client, and how it calls."""

from __future__ import annotations

from typing import Protocol, TypeVar

import grpc

from jaxctx.client.link import CHANNEL_OPTIONS, CallDefaults
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceStub
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub
from jaxctx.wire import from_rpc_error

Q = TypeVar("Q")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Responses(Protocol[A_co]):
    """A streaming call."""

    def __next__(self) -> A_co: ...

    def cancel(self) -> object: ...


class Connection:
    """One channel to a server. Opens lazily; lives until `close`."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, defaults: CallDefaults) -> None:
        self.defaults = defaults
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self.channel = grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self.contexts: ContextServiceStub = ContextServiceStub(self.channel)
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
