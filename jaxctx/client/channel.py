"""How calls travel: channel options, retries, metadata and deadlines, and the steps of one call; and what is closed
when its `async with` block is left.
"""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.client.requests import make
from jaxctx.convert import decode
from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx.rpc import CHANNEL_OPTIONS, from_rpc_error, method_of
from jaxctx.services import METHODS

T = TypeVar("T")

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0

# The contract says which methods may be repeated. Others may have happened: whoever wants to make a context once
# chooses its id, and takes AlreadyExists for the answer that was lost.
_REPEATABLE = [each for each in METHODS.values() if each.GetOptions().idempotency_level]
_RETRIES = {
    "name": [{"service": each.containing_service.full_name, "method": each.name} for each in _REPEATABLE],
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
    """One channel to a server. Opens lazily; lives until it is closed."""

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None, api_key: str | None, timeout_s: float | None
    ) -> None:
        """Space around the key (a file's last line feed) is not part of it.

        Raises InvalidArgument for a key that no header can carry; an empty one is a setting that was forgotten.
        """
        key = None if api_key is None else api_key.strip()
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise InvalidArgument.field("api_key", "must be printable ASCII text, not empty; None for no key")
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._timeout_s = timeout_s
        self._about: dict[str, str] = {}
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self._methods = {rpc: method_of(self.channel, rpc) for rpc in METHODS}

    def about(self, **fields: str) -> Self:
        """The same channel, for requests that all have these fields."""
        link = copy.copy(self)
        link._about = self._about | fields
        return link

    def request(self, method: str, /, **fields: Any) -> Message:
        """What a method is asked with these fields."""
        return make(GetMessageClass(METHODS[method].input_type), **self._about, **fields)

    def begin(self, method: str, request: object, timeout_s: float | None, *, endless: bool = False) -> Any:
        """Begin a call with the client's key, and its deadline if the call has none of its own and is not `endless`."""
        timeout_s = self._timeout_s if timeout_s is None and not endless else timeout_s
        return self._methods[method](request, timeout=timeout_s, metadata=self._metadata)

    async def call(self, method: str, timeout_s: float | None, /, **fields: Any) -> Any:
        """Call a method with a request of these fields; its response, or of a response with one field what that holds.

        Raises the errors of `jaxctx.errors`.
        """
        try:
            response = await self.begin(method, self.request(method, **fields), timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        told = response.DESCRIPTOR.fields
        return getattr(response, told[0].name) if len(told) == 1 else response

    async def read(self, call: Any) -> Any:
        """The next response of a streaming call; None after the last."""
        try:
            return await anext(aiter(call), None)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def stream(
        self, method: str, timeout_s: float | None, /, *, endless: bool = False, **fields: Any
    ) -> AsyncGenerator[Any, None]:
        """The responses of a streaming call, of a request of these fields. Leaving the iteration cancels the rest."""
        call = self.begin(method, self.request(method, **fields), timeout_s, endless=endless)
        try:
            while (response := await self.read(call)) is not None:
                yield response
        finally:
            call.cancel()

    async def ask(self, method: str, timeout_s: float | None, kind: type[T], /, **fields: Any) -> T:
        """As `call`; what comes, as an answer of this class."""
        told = await self.call(method, timeout_s, **fields)
        answer: T = decode(told, kind) if isinstance(told, Message) else told
        return answer

    async def items(self, method: str, timeout_s: float | None, kind: type[T], /, **fields: Any) -> AsyncIterator[T]:
        """A list that comes in parts: answers of this class, in the first field of the responses."""
        page_token: str | None = ""
        while page_token is not None:
            response = await self.call(method, timeout_s, page_token=page_token, **fields)
            for message in getattr(response, response.DESCRIPTOR.fields[0].name):
                yield decode(message, kind)
            page_token = response.next_page_token or None


class AsyncCloseable(ABC):
    """To be closed by hand, or by leaving its `async with` block."""

    @abstractmethod
    async def close(self) -> None:
        """Give up what it is of."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.close()
        except JaxctxError:
            if error is None:  # else the error of the block is the one to see
                raise
