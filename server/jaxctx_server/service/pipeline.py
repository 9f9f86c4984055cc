"""Every call's way in and out, the same for every transport.

    metadata ─▶ authorise ─▶ request id ─▶ limit of calls ─▶ read and validate the request ─▶ the service's method

A transport describes a call by its `CallMetadata`, enters `CallPipeline.admit`, reads the request within it
(`CallPipeline.read_request`) and calls the service. Whatever goes wrong on the way leaves `admit` as one of the errors
of `jaxctx.errors`, which the transport writes in its own form. Nothing of a request is read before it is known that its
caller may make the call. Whether the server is loading or has stopped is found out by `read_request`.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from jaxctx.errors import JaxctxError, PermissionDenied, ResourceExhausted, Unavailable
from jaxctx_server.auth import LOCAL, METHODS, NOBODY, Key, Role
from jaxctx_server.key_store import KeyStore
from jaxctx_server.logs import as_error
from jaxctx_server.service.request_reader import METHOD_OF_REQUEST, RequestReader

log = logging.getLogger("jaxctx.calls")
MAX_OPEN_CALLS = 64  # calls at once of methods that need no key
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMetadata:
    """Properties of a call that a transport knows before the request is read. None: not sent."""

    method: str  # "/jaxctx.v1.ContextService/Fill"; another transport's route names the method that it stands for
    peer: str  # the connection
    authorization: str | None
    request_id: str | None
    tenant: str | None  # for whom a router calls
    incarnation: str | None  # of the process that a router means


@dataclass(slots=True)
class Call:
    """One call on its way through the pipeline."""

    metadata: CallMetadata
    key: Key = NOBODY  # of the caller; of a router's call with the tenant that it is made for
    request_id: str = ""  # the caller's, or else a random one; empty while the caller is not known
    is_authorised: bool = False
    outcome: str = "CANCELLED"  # status code, for the log
    started_at: float = field(default_factory=time.monotonic)

    @property
    def budget_owner(self) -> tuple[str, str]:
        """Whose budget of reading time the request is charged to: without keys each connection has one."""
        owner = self.metadata.peer if self.key.name == LOCAL.name else self.key.name
        return owner, self.key.tenant


class CallPipeline:
    """Admits calls, and reads their requests. Used on the event loop, by all transports of one server together."""

    def __init__(self, keys: KeyStore, reader: RequestReader, *, max_calls: int, incarnation: str) -> None:
        """`max_calls` at once, over all connections. Methods that need no key have a limit of their own, so that those
        who have none cannot use up the calls of others. `incarnation` is that of this process, for its router.
        """
        self._keys = keys
        self._reader = reader
        self._incarnation = incarnation
        self._open_calls = asyncio.Semaphore(MAX_OPEN_CALLS)
        self._calls = asyncio.Semaphore(max_calls)
        self._router_calls = asyncio.Semaphore(max_calls)  # or clients could make an engine look lost to its router

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self._keys.keys is not None

    @asynccontextmanager
    async def admit(self, call: Call, transport_errors: tuple[type[Exception], ...] = ()) -> AsyncIterator[None]:
        """While entered, a call is in progress. Sets `key` and `request_id` of the call.

        Every exception within it leaves it as a JaxctxError, save for `transport_errors`, which say that the caller is
        gone. Raises Unauthenticated, PermissionDenied, ResourceExhausted (QUEUE_FULL), or Unavailable (ENGINE_LOST) for
        a router's call that is meant for an earlier incarnation. An authorised call is a line of the log, at level
        DEBUG.
        """
        try:
            accepted_key = self._authorise(call)
            limit = self._limit_of(call)
            self._check_incarnation(call)
            self._choose_request_id(call)
            if limit.locked():
                raise ResourceExhausted("too many calls at once", reason="QUEUE_FULL", retry_after_s=1.0)
            async with limit, self._keys.revocable_call(accepted_key):
                yield
            call.outcome = "OK"
        except transport_errors:
            raise
        except JaxctxError as error:
            call.outcome = error.code
            raise
        except Exception as exception:
            incident = as_error(exception, {"method": call.metadata.method, "request_id": call.request_id})
            call.outcome = incident.code
            raise incident from exception
        finally:
            if call.is_authorised:
                self._log(call)

    async def read_request(self, call: Call, receive: Callable[[], Awaitable[Any]]) -> Message:
        """The valid request of a call of the contract's, whose bytes `receive` returns.

        Raises InvalidArgument, ResourceExhausted (QUEUE_FULL), or Unavailable (NOT_SERVING) while the server loads.
        """
        return await self._reader.read(call.metadata.method, call.budget_owner, receive)

    async def parse_body(self, call: Call, data: bytes, parse: Callable[[bytes], T]) -> T:
        """The result of `parse` for a request that is no message of the contract (JSON), within its caller's budget.

        Raises what `parse` raises, ResourceExhausted (QUEUE_FULL), or Unavailable (NOT_SERVING) while the server loads.
        """
        return await self._reader.parse(call.budget_owner, data, parse)

    async def check_request(self, call: Call, request: Message) -> None:
        """Check a message that a transport made itself, for a call of a service within this call.

        Raises PermissionDenied if the caller's role is too low for the method, and InvalidArgument, ResourceExhausted
        and Unavailable as `read_request`.
        """
        if METHODS[METHOD_OF_REQUEST[request.DESCRIPTOR.full_name]] > call.key.role:
            raise PermissionDenied("this method needs a key of another role")
        await self._reader.check(call.budget_owner, request)

    def _authorise(self, call: Call) -> Key:
        """The key as the key store has it. The call's gets the tenant that a router names."""
        accepted_key = self._keys.authorise(call.metadata.method, call.metadata.authorization)
        call.key = accepted_key
        call.is_authorised = True
        if accepted_key.role is Role.CLUSTER:
            call.key = replace(accepted_key, tenant=call.metadata.tenant or accepted_key.tenant)
        return accepted_key

    def _limit_of(self, call: Call) -> asyncio.Semaphore:
        if call.key.role is Role.CLUSTER and call.metadata.incarnation:
            return self._router_calls
        return self._open_calls if METHODS[call.metadata.method] is Role.ANYONE else self._calls

    def _check_incarnation(self, call: Call) -> None:
        if call.key.role is Role.CLUSTER and call.metadata.incarnation not in (None, self._incarnation):
            message = "meant for an earlier incarnation of this engine"
            raise Unavailable(message, reason="ENGINE_LOST", retry_after_s=1.0)

    def _choose_request_id(self, call: Call) -> None:
        given = call.metadata.request_id or ""
        call.request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)

    def _log(self, call: Call) -> None:
        facts = {
            "method": call.metadata.method,
            "request_id": call.request_id,
            "caller": call.key.name,
            "code": call.outcome,
            "seconds": round(time.monotonic() - call.started_at, 6),
        }
        log.debug("call", extra=facts)
