"""Requests from bytes to valid messages: scanned, parsed and validated, within their caller's budget of time.

Reading a request holds up the event loop or, on another thread, the Python interpreter itself. So each caller has a
budget: `SHARE` of the time, of which up to `BURST_S` may be taken at once. A caller who has used it up is not refused;
its next request is read when the time has passed, and until then what is on its way stays with the sender. Large
requests of a caller that have been received wait for each other. Small requests cost their caller nothing.

    bytes ─▶ [wait for the caller's budget ─▶ receive] ─▶ scan ─▶ parse ─▶ validate ─▶ the service
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.errors import InvalidArgument, ResourceExhausted, Unavailable
from jaxctx.rpc import SERVICES
from jaxctx.v1 import rules_pb2
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.validate import Limits, validate
from jaxctx_server.validate.scan import NO_MESSAGE, scan

MAX_UNSCANNED_BYTES = 1 << 12  # so few cannot hold enough to be worth counting first
MAX_INLINE_BYTES = 1 << 16  # read on the event loop, unless they have very many fields
SHARE = 0.05  # of the time, for the large requests of one caller
BURST_S = 2.0  # of which so much may be saved up: 0.1 s of work
MAX_WAIT_S = 10.0  # for the caller's other large requests, and for its budget; a longer wait is refused
CONVERSION_FACTOR = 2  # times what reading a large request costs: converting it to plain data costs as much again
RECEIVE_S_PER_BYTE = 1e-9  # what a byte costs until it has been received
MAX_LARGE_BYTES = 64 << 20  # of one caller's large requests that have been received and not been read yet
PAUSE_S = 5e-5  # between stretches of a scan on the thread, so that other threads get the interpreter
ROUTER_CONTEXT_TOKENS = 1 << 17  # bound of a list on a router whose engines take shorter contexts, or are away
MAX_IDLE_BUDGETS = 1024  # callers that are remembered though they owe nothing
NOT_ONE_MESSAGE = "must be one message"
# The request's message type, for every method of the contract by its full name.
REQUEST_TYPES: dict[str, Descriptor] = {
    f"/{service.full_name}/{method.name}": method.input_type
    for service in SERVICES.values()
    for method in service.methods
}
# The method that takes a request of this type: each has a type of its own.
METHOD_OF_REQUEST: dict[str, str] = {kind.full_name: method for method, kind in REQUEST_TYPES.items()}
WORK_METHODS = frozenset(
    f"/{service.full_name}/{method.name}"
    for service in SERVICES.values()
    for method in service.methods
    if method.GetOptions().Extensions[rules_pb2.work]
)
"""Methods that begin new work, which a server that drains refuses (rules.proto)."""
T = TypeVar("T")


class ScanTooLong(Exception):
    """A scan takes longer than the event loop may be held up."""


@dataclass(slots=True)
class Budget:
    """Reading time of one caller."""

    free_at: float = 0.0  # when the caller has paid for all that it has used
    large_bytes: int = 0  # of large requests that have been received and not been read yet
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the large request that is being read


class RequestReader:
    """Reads requests of the contract. Used on the event loop; large ones are read on a thread."""

    def __init__(self, lifecycle: ServerLifecycle, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        self._budgets: dict[Hashable, Budget] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxctx-reading")

    def check_accepts(self, method: str) -> None:
        """Raise Unavailable (DRAINING) for a call of a method that begins new work, once the server takes none."""
        if method in WORK_METHODS and self._lifecycle.finishes_long_work:
            raise Unavailable("the server is draining", reason="DRAINING", retry_after_s=5.0)

    async def read(self, method: str, owner: Hashable, receive: Callable[[], Awaitable[Any]]) -> Message:
        """The valid request of a method of the contract. `receive` returns its bytes; `owner` is whose budget it is.

        Raises InvalidArgument for all that is wrong with it, ResourceExhausted if the owner's large requests take too
        long already, Unavailable (NOT_SERVING) while the server loads.
        """
        budget = self._budget(owner)
        await self._wait_for(budget)
        data = await receive()
        if not isinstance(data, bytes):
            raise InvalidArgument.field("request", NOT_ONE_MESSAGE)
        kind, state = REQUEST_TYPES[method], self._lifecycle.served()
        if len(data) <= MAX_UNSCANNED_BYTES:
            return parse_and_validate(kind, state, data)
        if len(data) <= MAX_INLINE_BYTES:
            try:
                return self._read_inline(budget, kind, state, data)
            except ScanTooLong:
                pass
        return await self._read_large(budget, kind, state, data)

    async def parse(self, owner: Hashable, data: bytes, parse: Callable[[bytes], T]) -> T:
        """The result of `parse` for bytes that are no message of the contract. `owner` is whose budget it is.

        Raises what `parse` raises, and ResourceExhausted and Unavailable as `read`.
        """
        self._lifecycle.served()
        budget = self._budget(owner)
        await self._wait_for(budget)
        return await self._run(budget, len(data), partial(parse, data))

    async def convert(self, owner: Hashable, size: int, work: Callable[[], T], *, patient: bool = False) -> T:
        """The result of work on about so many bytes that are no request: what is stored for the owner, or sent to it.

        `patient`: it waits for the owner's budget for as long as it takes, where a refusal would lose what is done.
        Raises what the work raises, and ResourceExhausted as `read` unless it is patient.
        """
        return await self._run(self._budget(owner), size, work, patient=patient)

    async def check(self, owner: Hashable, request: Message, *, patient: bool = False) -> None:
        """Validate a request that a transport made of something else. Raises as `read`; `patient` as in `convert`."""
        work = partial(validate, self._lifecycle.served().limits, request)
        await self._run(self._budget(owner), request.ByteSize(), work, patient=patient)

    async def _run(self, budget: Budget, size: int, work: Callable[[], T], *, patient: bool = False) -> T:
        """The result of work on so many bytes: of few at once, of many on the thread."""
        if size <= MAX_UNSCANNED_BYTES:
            return work()
        if size <= MAX_INLINE_BYTES:
            started = time.perf_counter()
            try:
                return work()
            finally:
                self._charge(budget, time.perf_counter() - started)
        return await self._run_large(budget, size, work, patient=patient)

    def _read_inline(self, budget: Budget, kind: Descriptor, state: ServingState, data: bytes) -> Message:
        """Read a request on the event loop. Raises ScanTooLong if it has too many fields for that."""
        started = time.perf_counter()
        try:
            scan(kind, scan_limits(state), data, raise_too_long)
            return parse_and_validate(kind, state, data)
        finally:
            self._charge(budget, time.perf_counter() - started)

    async def _read_large(self, budget: Budget, kind: Descriptor, state: ServingState, data: bytes) -> Message:
        """Read a request on the thread, after the caller's other large ones."""
        return await self._run_large(budget, len(data), partial(scan_parse_and_validate, kind, state, data))

    async def _run_large(self, budget: Budget, size: int, work: Callable[[], T], *, patient: bool = False) -> T:
        """The result of work on the thread, after the caller's other large requests."""
        if budget.large_bytes and budget.large_bytes + size > MAX_LARGE_BYTES and not patient:
            message = f"{budget.large_bytes} bytes of large requests of this caller wait to be read"
            raise ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=1.0)
        budget.large_bytes += size
        try:
            running = await self._begin_on_thread(budget, size, work, patient=patient)
        except BaseException:
            budget.large_bytes -= size
            raise
        return await asyncio.wrap_future(running)

    async def _begin_on_thread(self, budget: Budget, size: int, work: Callable[[], T], *, patient: bool) -> Future[T]:
        """Begin work on the thread, once it is its turn. It ends (`_end_on_thread`) when the thread is done with it,
        also where nobody waits for it any more: what the thread computes for a request that was cancelled is no gift.
        """
        await self._take_turn(budget, patient=patient)
        timed = TimedWork(work)
        try:
            await self._wait_for(budget, patient=patient)
            running = self._thread.submit(timed.run)
        except BaseException:
            budget.turn.release()
            raise
        loop = asyncio.get_running_loop()

        def tell(_: Future[T]) -> None:  # on the thread; on the loop for work that was cancelled before it began
            with suppress(RuntimeError):  # the loop is closed: nobody asks for anything any more
                loop.call_soon_threadsafe(self._end_on_thread, budget, size, timed)

        running.add_done_callback(tell)
        return running

    def _end_on_thread(self, budget: Budget, size: int, timed: "TimedWork[Any]") -> None:
        """The thread is done with this work: it is paid for, and the next one has its turn."""
        self._charge(budget, size * RECEIVE_S_PER_BYTE + CONVERSION_FACTOR * timed.thread_s)
        budget.large_bytes -= size
        budget.turn.release()

    async def _take_turn(self, budget: Budget, *, patient: bool) -> None:
        """Wait until no other large request of the caller is read. Raises ResourceExhausted if that takes too long."""
        try:
            async with asyncio.timeout(None if patient else MAX_WAIT_S):
                await budget.turn.acquire()
        except TimeoutError:
            raise used_up(max(budget.free_at - self._clock(), 1.0)) from None

    def _budget(self, owner: Hashable) -> Budget:
        if len(self._budgets) > MAX_IDLE_BUDGETS:
            now = self._clock()
            self._budgets = {
                each: budget for each, budget in self._budgets.items() if budget.free_at > now or budget.large_bytes
            }
        return self._budgets.setdefault(owner, Budget())

    async def _wait_for(self, budget: Budget, *, patient: bool = False) -> None:
        """Wait until the caller may cost something again. Raises ResourceExhausted if that takes too long."""
        while (wait_s := budget.free_at - self._clock()) > 0:
            if wait_s > MAX_WAIT_S and not patient:
                raise used_up(wait_s)
            await asyncio.sleep(wait_s)

    def _charge(self, budget: Budget, cost_s: float) -> None:
        budget.free_at = max(budget.free_at, self._clock() - BURST_S) + cost_s / SHARE


class TimedWork(Generic[T]):
    """Work for a large request on a thread, and the processor time that it took there."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.thread_s = 0.0

    def run(self) -> T:
        """The result of the work. Raises what that raises."""
        started = time.thread_time()
        try:
            return self._work()
        finally:
            self.thread_s = time.thread_time() - started


def used_up(wait_s: float) -> ResourceExhausted:
    """The error for a caller whose large requests take longer to read than it may wait."""
    message = "large requests of this caller have used up its share of the time"
    return ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=wait_s)


def scan_parse_and_validate(kind: Descriptor, state: ServingState, data: bytes) -> Message:
    """The valid message of that type, for the thread of large requests. Raises InvalidArgument."""
    scan(kind, scan_limits(state), data, pause)
    return parse_and_validate(kind, state, data)


def parse_and_validate(kind: Descriptor, state: ServingState, data: bytes) -> Message:
    """The valid message of that type. Raises InvalidArgument."""
    try:
        request = GetMessageClass(kind).FromString(data)
    except DecodeError:
        raise InvalidArgument.field("request", NO_MESSAGE) from None
    validate(state.limits, request)
    return request


def scan_limits(state: ServingState) -> Limits:
    """The limits of requests. On a router, which has no model, they are the largest that one of its engines has."""
    if state.model is not None:
        return state.limits
    lengths = [handle.engine.info.max_context_tokens for handle in state.engine_handles()]
    return replace(state.limits, max_context_tokens=max([ROUTER_CONTEXT_TOKENS, *lengths]))


def raise_too_long() -> None:
    """End a scan on the event loop at its first pause."""
    raise ScanTooLong


def pause() -> None:
    """Let other threads run during a scan on the thread."""
    time.sleep(PAUSE_S)
