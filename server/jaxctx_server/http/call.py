"""One HTTP request on its way through the server: its body, its caller, and the calls of the services that it needs.

A request is admitted once, as one call of the contract (see `endpoint.py`). The calls of services that it then makes
are checked like any other: the caller's role for each, and every field of each message by the rules of the contract.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from google.protobuf.message import Message
from starlette.requests import Request

from jaxctx.engine.interface import Caller
from jaxctx_server.http.frontend import Frontend
from jaxctx_server.service.pipeline import Call
from jaxctx_server.services import Services, make_caller

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """A request that was admitted. Its body has been received."""

    request: Request
    body: bytes  # empty for methods that have none
    frontend: Frontend
    call: Call
    caller: Caller

    @property
    def services(self) -> Services:
        """The services of the server, for `unary` and `stream`."""
        return self.frontend.backend.services

    async def parse_body(self, parse: Callable[[bytes], T]) -> T:
        """The result of `parse` for the body. A large body is parsed on a thread, within its caller's budget of time.

        Raises what `parse` raises, ResourceExhausted (QUEUE_FULL) if the caller's large requests take too long, and
        Unavailable (NOT_SERVING) while the server loads.
        """
        return await self.frontend.backend.pipeline.parse_body(self.call, self.body, parse)

    async def check(self, message: Message) -> None:
        """Raise the errors of a message that is not valid, without making the call. Raises as `unary`."""
        await self.frontend.backend.pipeline.check_request(self.call, message)

    async def convert(self, size: int, work: Callable[[], T], *, patient: bool = False) -> T:
        """The result of work on about so many bytes that are stored for the caller or sent to it: of many bytes on a
        thread, within the caller's budget of time.

        Raises what the work raises, and ResourceExhausted (QUEUE_FULL) if the caller's large requests take too long;
        with `patient` it waits instead.
        """
        return await self.frontend.backend.pipeline.convert(self.call, size, work, patient=patient)

    async def unary(
        self,
        method: Callable[[Caller, RequestT], Awaitable[ResponseT]],
        message: RequestT,
        *,
        patient: bool = False,
        draws_ids: bool = False,
    ) -> ResponseT:
        """The response of a method of a service. Raises its errors, and those of a message that is not valid.

        `patient`: to check a large message waits for the caller's budget, instead of being refused. `draws_ids`: see
        `Caller`.
        """
        await self.frontend.backend.pipeline.check_request(self.call, message, patient=patient)
        return await method(replace(self.caller, draws_ids=draws_ids), message)

    async def stream(
        self, method: Callable[[Caller, RequestT], AsyncGenerator[ResponseT, None]], message: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """The responses of a streaming method. Raises as `unary`. To be closed as soon as it is no longer read."""
        await self.frontend.backend.pipeline.check_request(self.call, message)
        async with aclosing(method(self.caller, message)) as responses:
            async for response in responses:
                yield response


def make_call(request: Request, body: bytes, frontend: Frontend, call: Call) -> HttpCall:
    """The call of a request that was admitted."""
    caller = make_caller(call.key, frontend.backend.clock)
    return HttpCall(request=request, body=body, frontend=frontend, call=call, caller=caller)
