"""Every call's way in and out, the same for every transport.

    metadata ─▶ request id ─▶ authorise ─▶ trace ─▶ limit of calls ─▶ read and validate the request ─▶ the service

A transport describes a call by its `CallMetadata`, enters `CallPipeline.admit`, reads the request within it
(`CallPipeline.read_request`) and calls the service. Whatever goes wrong on the way leaves `admit` as one of the errors
of `jaxctx.errors`, which the transport writes in its own form. Nothing of a request is read before it is known that its
caller may make the call. Whether the server is loading or has stopped is found out by `read_request`.

Every call is counted in the metrics. One that is authorised is a line of the log at level DEBUG and, if the server has
a tracer, a span. What it did (tokens, finish reasons) is in its `CallRecord`, which the services fill in.
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
from jaxctx_server.auth import METHODS, NOBODY, Key, Role
from jaxctx_server.call_record import CURRENT_RECORD, CallRecord
from jaxctx_server.call_trace import TRACEPARENT, CallSpan, CallTracer
from jaxctx_server.key_store import KeyStore
from jaxctx_server.logs import as_error
from jaxctx_server.metrics.calls import OTHER, CallMetrics
from jaxctx_server.service.request_reader import METHOD_OF_REQUEST, RequestReader

log = logging.getLogger("jaxctx.calls")
# Calls at once of each method that needs no key, so that streams of Watch leave Check alone; and of heartbeats.
MAX_OPEN_CALLS = 64
HEARTBEAT = "/jaxctx.v1.AdminService/GetStats"  # what a router asks its engines at every heartbeat
# Methods whose calls have no span: probes and heartbeats.
UNTRACED = frozenset((HEARTBEAT, *(method for method, role in METHODS.items() if role is Role.ANYONE)))
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
    traceparent: str | None = None  # W3C trace context of the caller
    transport: str = OTHER  # "grpc" or "http"
    operation: str | None = None  # gen_ai.operation.name of OpenTelemetry: "chat"; None: what the method says


@dataclass(slots=True)
class Call:
    """One call on its way through the pipeline."""

    metadata: CallMetadata
    key: Key = NOBODY  # of the caller; of a router's call with the tenant that it is made for
    request_id: str = ""  # the caller's, or else a random one; set by `admit`
    is_authorised: bool = False
    outcome: str = "CANCELLED"  # status code
    reason: str | None = None  # of the error that it ended with
    record: CallRecord = field(default_factory=CallRecord)  # what it did
    span: CallSpan | None = None  # None: it is not traced

    @property
    def started_at(self) -> float:
        """When it came, in seconds of the monotonic clock."""
        return self.record.started_at

    @property
    def budget_owner(self) -> tuple[str, str]:
        """Whose budget of reading time the request is charged to: without keys each connection has one."""
        is_without_key = not self.key.sha256
        owner = self.metadata.peer if is_without_key else self.key.name
        return owner, self.key.tenant


class CallPipeline:
    """Admits calls, and reads their requests. Used on the event loop, by all transports of one server together."""

    def __init__(
        self,
        keys: KeyStore,
        reader: RequestReader,
        *,
        max_calls: int,
        incarnation: str,
        metrics: CallMetrics | None = None,
        tracer: CallTracer | None = None,
    ) -> None:
        """`max_calls` at once, over all connections. Methods that need no key have a limit of their own, so that those
        who have none cannot use up the calls of others. `incarnation` is that of this process, for its router.
        `metrics` counts the calls; `tracer` makes their spans, None: they have none.
        """
        self._keys = keys
        self._reader = reader
        self._incarnation = incarnation
        self._metrics = metrics or CallMetrics()
        self._tracer = tracer
        self._open_calls = {
            method: asyncio.Semaphore(MAX_OPEN_CALLS) for method, role in METHODS.items() if role is Role.ANYONE
        }
        self._calls = asyncio.Semaphore(max_calls)
        self._router_calls = asyncio.Semaphore(max_calls)  # or clients could keep out what a router forwards
        # Or the calls that a router forwards could make an engine look lost to it.
        self._heartbeats = asyncio.Semaphore(MAX_OPEN_CALLS)

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self._keys.keys is not None

    @asynccontextmanager
    async def admit(self, call: Call, transport_errors: tuple[type[Exception], ...] = ()) -> AsyncIterator[None]:
        """While entered, a call is in progress, and its record is `CURRENT_RECORD`. Sets `key` and `request_id` of the
        call.

        Every exception within it leaves it as a JaxctxError, save for `transport_errors`, which say that the caller is
        gone. Raises Unauthenticated, PermissionDenied, ResourceExhausted (QUEUE_FULL), or Unavailable (ENGINE_LOST) for
        a router's call that is meant for an earlier incarnation.
        """
        self._metrics.began(call.metadata.transport)
        CURRENT_RECORD.set(call.record)
        call.request_id = request_id_of(call.metadata.request_id)
        try:
            accepted_key = self._authorise(call)
            limit = self._limit_of(call)
            self._check_incarnation(call)
            self._trace(call)
            if limit.locked():
                raise ResourceExhausted("too many calls at once", reason="QUEUE_FULL", retry_after_s=1.0)
            async with limit, self._keys.revocable_call(accepted_key):
                yield
            call.outcome = "OK"
        except transport_errors:
            raise
        except JaxctxError as error:
            call.outcome, call.reason = error.code, error.reason
            raise
        except Exception as exception:
            incident = as_error(exception, {"method": call.metadata.method, "request_id": call.request_id})
            call.outcome, call.reason = incident.code, incident.reason
            raise incident from exception
        finally:
            self._ended(call)

    @asynccontextmanager
    async def while_accepted(self, call: Call) -> AsyncIterator[None]:
        """While entered, the caller has a connection and no call in progress. Raises Unauthenticated as soon as its key
        is not accepted any more, PermissionDenied if that may not make this call.
        """
        accepted_key = self._keys.authorise(call.metadata.method, call.metadata.authorization)
        async with self._keys.revocable_call(accepted_key):
            yield

    async def read_request(self, call: Call, receive: Callable[[], Awaitable[Any]]) -> Message:
        """The valid request of a call of the contract's, whose bytes `receive` returns.

        Raises InvalidArgument, ResourceExhausted (QUEUE_FULL), or Unavailable (NOT_SERVING) while the server loads and
        (DRAINING) once it takes no new work.
        """
        self._reader.check_accepts(call.metadata.method)
        return await self._reader.read(call.metadata.method, call.budget_owner, receive)

    async def parse_body(self, call: Call, data: bytes, parse: Callable[[bytes], T]) -> T:
        """The result of `parse` for a request that is no message of the contract (JSON), within its caller's budget.

        Raises what `parse` raises, ResourceExhausted (QUEUE_FULL), or Unavailable (NOT_SERVING) while the server loads
        and (DRAINING) once it takes no new work.
        """
        self._reader.check_accepts(call.metadata.method)
        return await self._reader.parse(call.budget_owner, data, parse)

    async def convert(self, call: Call, size: int, work: Callable[[], T], *, patient: bool = False) -> T:
        """The result of work on about so many bytes that are stored for the caller or sent to it, within its budget: of
        many bytes on a thread. `patient` and errors: see `RequestReader.convert`.
        """
        return await self._reader.convert(call.budget_owner, size, work, patient=patient)

    async def check_request(self, call: Call, request: Message, *, patient: bool = False) -> None:
        """Check a message that a transport made itself, for a call of a service within this call.

        Raises PermissionDenied if the caller's role is too low for the method, and InvalidArgument, ResourceExhausted
        and Unavailable as `read_request`. `patient`: a large one waits for its turn instead of being refused.
        """
        if METHODS[METHOD_OF_REQUEST[request.DESCRIPTOR.full_name]] > call.key.role:
            raise PermissionDenied("this method needs a key of another role")
        await self._reader.check(call.budget_owner, request, patient=patient)

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
            return self._heartbeats if call.metadata.method == HEARTBEAT else self._router_calls
        return self._open_calls.get(call.metadata.method, self._calls)

    def _check_incarnation(self, call: Call) -> None:
        if call.key.role is Role.CLUSTER and call.metadata.incarnation not in (None, self._incarnation):
            message = "meant for an earlier incarnation of this engine"
            raise Unavailable(message, reason="ENGINE_LOST", retry_after_s=1.0)

    def _trace(self, call: Call) -> None:
        """Begin the call's span. Without one, the caller's trace context goes on to calls on behalf of this one."""
        traceparent = call.metadata.traceparent
        if self._tracer is not None and call.metadata.method not in UNTRACED:
            call.span = self._tracer.start(
                call.metadata.method,
                transport=call.metadata.transport,
                operation=call.metadata.operation,
                traceparent=traceparent,
                request_id=call.request_id,
            )
            call.record.traceparent = call.span.traceparent
        elif traceparent is not None and TRACEPARENT.fullmatch(traceparent):
            call.record.traceparent = traceparent

    def _ended(self, call: Call) -> None:
        """Count a call that has ended; end its span, and write its line."""
        metadata = call.metadata
        self._metrics.ended(metadata.method, metadata.transport, call.outcome, call.reason, call.started_at)
        if call.span is not None:
            call.span.end(call.record, call.outcome, call.reason)
        if call.is_authorised and log.isEnabledFor(logging.DEBUG):
            log.debug("call", extra=facts_of(call))


def request_id_of(given: str | None) -> str:
    """The id of a request: the one that its caller gave if that is fit to be one, else a random one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def facts_of(call: Call) -> dict[str, str | int | float]:
    """The fields of a call's line in the log; those that it does not have are left out."""
    facts: dict[str, str | int | float | None] = {
        "method": call.metadata.method,
        "transport": call.metadata.transport,
        "request_id": call.request_id,
        "caller": call.key.name,
        "tenant": call.key.tenant,
        "code": call.outcome,
        "reason": call.reason,
        "prompt_tokens": call.record.prompt_tokens,
        "cached_tokens": call.record.cached_tokens,
        "completion_tokens": call.record.completion_tokens,
        "seconds": round(time.monotonic() - call.started_at, 6),
    }
    return {name: value for name, value in facts.items() if value is not None}
