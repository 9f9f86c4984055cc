"""The connection to a server: its stubs, retries, metadata and deadlines; and what `async with` closes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from jaxctx.client.calls import CALL_CANCELLED, Deadline, grpc_timeout_s, raise_if_closed
from jaxctx.client.tls import Tls, channel_credentials
from jaxctx.errors import FailedPrecondition, InvalidArgument, JaxctxError
from jaxctx.rpc import CHANNEL_OPTIONS, METHODS, from_rpc_error
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceStub
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from jaxctx.v1.snapshot_service_pb2_grpc import SnapshotServiceStub

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0

# The contract says which methods may be repeated. A call of another method may have been carried out although its
# answer was lost. To create a context only once, choose its id: AlreadyExists then stands for the lost answer.
_REPEATABLE_METHODS = [method for method in METHODS.values() if method.GetOptions().idempotency_level]
_RETRIES = {
    "name": [{"service": method.containing_service.full_name, "method": method.name} for method in _REPEATABLE_METHODS],
    "retryPolicy": {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    },
}
_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps({"methodConfig": [_RETRIES]})),
]


class Channel:
    """One channel to a server, with a stub for each service. Opens with the first call; stays open until `close`.

    A call is one of the stubs' methods with its request: `await channel.call(channel.contexts.Fill, request, 10.0)`.
    """

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        api_key: str | None,
        timeout_s: float | None,
        tls: Tls | None = None,
    ) -> None:
        """`tls` or `credentials` switch TLS on. White space around the key (a file's last line feed) is not part of it.

        `timeout_s` is the deadline of calls that have none of their own; None, or infinity: none.

        Raises InvalidArgument for a key that no header can carry (an empty one is a setting that was forgotten), for a
        timeout that is no number, and for files of `tls` that are wrong.
        """
        credentials = channel_credentials(tls, credentials)
        key = None if api_key is None else api_key.strip()
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise InvalidArgument.field("api_key", "must be printable ASCII text, not empty; None for no key")
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._timeout_s = grpc_timeout_s(timeout_s)
        self._closed = False
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self.contexts = ContextServiceStub(self._channel)
        self.snapshots = SnapshotServiceStub(self._channel)
        self.sessions = SessionServiceStub(self._channel)
        self.models = ModelServiceStub(self._channel)
        self.admin = AdminServiceStub(self._channel)

    def deadline(self, timeout_s: float | None) -> Deadline:
        """The end of an operation that begins now: after `timeout_s`, else the client's."""
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    def start(self, method: Any, request: Message, timeout_s: float | None, *, endless: bool = False) -> Any:
        """Start a call of a stub's method, with the client's key.

        Its deadline is `timeout_s`, else the client's; a call that is `endless` has none unless it is given here.
        Infinity is no deadline either. Raises FailedPrecondition once the client is closed, InvalidArgument for a
        timeout that is no number.
        """
        self._raise_if_closed()
        deadline_s = self._timeout_s if timeout_s is None and not endless else timeout_s
        try:
            return method(request, timeout=grpc_timeout_s(deadline_s), metadata=self._metadata)
        except ValueError:  # gRPC's own, if another thread has closed the client just now
            self._raise_if_closed()
            raise

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise FailedPrecondition("the client was closed")

    async def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float | None,
    ) -> ResponseT:
        """Call a method that has one response. Raises the errors of `jaxctx.errors`."""
        try:
            response: ResponseT = await self.start(method, request, timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except CALL_CANCELLED:
            raise_if_closed()
            raise
        return response

    async def read(self, call: Any) -> Any:
        """The next response of a streaming call that was started; None after the last.

        Raises the errors of `jaxctx.errors`.
        """
        try:
            return await anext(aiter(call), None)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except CALL_CANCELLED:
            raise_if_closed()
            raise

    async def stream(
        self,
        method: grpc.UnaryStreamMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float | None,
        *,
        endless: bool = False,
    ) -> AsyncGenerator[ResponseT, None]:
        """The responses of a streaming call. Leaving the iteration cancels the rest."""
        call = self.start(method, request, timeout_s, endless=endless)
        try:
            while (response := await self.read(call)) is not None:
                yield response
        finally:
            call.cancel()

    async def pages(
        self, method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT], request: RequestT, timeout_s: float | None
    ) -> AsyncGenerator[ResponseT, None]:
        """The responses of a method that lists, page after page. The request's `page_token` is set on the way."""
        next_request: Any = request
        while True:
            response: Any = await self.call(method, next_request, timeout_s)
            yield response
            if not response.next_page_token:
                return
            next_request.page_token = response.next_page_token

    async def close(self) -> None:
        """Close the connection. Calls under way end with Cancelled, later ones raise FailedPrecondition."""
        self._closed = True
        await self._channel.close()


class AsyncCloseable(ABC):
    """An object that leaving its `async with` block closes."""

    @abstractmethod
    async def close(self) -> None:
        """Give up what this object stands for."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.close()
        except JaxctxError:
            if error is None:  # else the error of the block is the one to see
                raise
