"""Requests from bytes to what a method may see: counted, parsed, validated, in this order, and within what their caller
may cost others.

Everything here holds up the event loop or, on another thread, Python itself. So each caller has a budget: `SHARE` of
the time, of which up to `AHEAD_S` may be taken at once. Who has used it up is not refused, but read no further until
the time has passed, so that what is on its way stays with the sender. Small requests cost their caller nothing.

bytes ─▶ [the caller's turn ─▶ receive] ─▶ scan ─▶ parse ─▶ validate ─▶ the method
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.errors import InvalidArgument, ResourceExhausted
from jaxctx.services import METHODS
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.validate import Limits, validate
from jaxctx_server.validate.scan import NO_MESSAGE, scan

TINY = 1 << 12  # bytes that cannot hold enough to be counted first
SMALL = 1 << 16  # bytes that are read on the event loop, if they are few fields
OTHERS_BYTES = 1 << 16  # of a message of gRPC's own services, which have no rules
SHARE = 0.05  # of the time, for the large requests of one caller
AHEAD_S = 2.0  # of which so much may be saved up: 0.1 s of work
LONGEST_WAIT_S = 10.0  # for a turn; more is refused
MADE_OF_IT = 2  # times what reading a large request costs: a method makes plain data of it, which costs as much again
RECEIVE_S = 1e-9  # what a byte costs until it is here
AT_ONCE = 4  # large requests of a caller that are here and not yet read
PAUSE_S = 5e-5  # between stretches of a scan on the thread, so that others get Python
LONGEST_CONTEXT = 1 << 17  # tokens, to a router whose engines are of shorter ones, or away
MOST_CALLERS = 1024  # that are remembered beyond their turn
KINDS = {f"/{each.containing_service.full_name}/{name}": each.input_type for name, each in METHODS.items()}


class Long(Exception):
    """A scan takes longer than the event loop may be held up."""


@dataclass(slots=True)
class Budget:
    """Of one caller."""

    free_at: float = 0.0  # when all that it took has been made up for
    here: int = 0  # large requests
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of large requests that are here


class RequestReader:
    """Lives on the event loop."""

    def __init__(self, serving: ServerLifecycle, clock: Callable[[], float] = time.monotonic) -> None:
        self._serving = serving
        self._clock = clock
        self._budgets: dict[Hashable, Budget] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxctx-reading")

    async def request(self, method: str, caller: Hashable, receive: Callable[[], Awaitable[Any]]) -> Message:
        """The valid request that `receive` has the bytes of, for a method of the contract.

        Raises InvalidArgument for all that is wrong with it, ResourceExhausted if the caller's large requests take too
        long as it is.
        """
        budget = self._budget(caller)
        await self._turn(budget)
        data = await receive()
        if not isinstance(data, bytes):
            raise InvalidArgument.field("request", "must be one message")
        kind, served = KINDS[method], self._serving.served()
        if len(data) <= TINY:
            return _parsed(kind, served, data)
        try:
            return self._read_here(budget, kind, served, data)
        except Long:
            pass
        if budget.here >= AT_ONCE:
            message = f"{AT_ONCE} large requests of this caller are being read"
            raise ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=1.0)
        budget.here += 1
        try:
            async with budget.turn:
                await self._turn(budget)
                return await self._read_elsewhere(budget, kind, served, data)
        finally:
            budget.here -= 1

    def _read_here(self, budget: Budget, kind: Descriptor, served: ServingState, data: bytes) -> Message:
        """Raises Long for what is not to be read on the event loop."""
        if len(data) > SMALL:
            raise Long
        started = time.perf_counter()
        try:
            scan(kind, _bounds(served), data, _too_long)
            return _parsed(kind, served, data)
        finally:
            self._charge(budget, time.perf_counter() - started)

    async def _read_elsewhere(self, budget: Budget, kind: Descriptor, served: ServingState, data: bytes) -> Message:
        cost_s = len(data) * RECEIVE_S

        def read() -> Message:
            nonlocal cost_s
            started = time.thread_time()
            try:
                scan(kind, _bounds(served), data, lambda: time.sleep(PAUSE_S))
                return _parsed(kind, served, data)
            finally:
                cost_s += MADE_OF_IT * (time.thread_time() - started)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        finally:
            self._charge(budget, cost_s)

    def _budget(self, caller: Hashable) -> Budget:
        if len(self._budgets) > MOST_CALLERS:
            now = self._clock()
            self._budgets = {who: each for who, each in self._budgets.items() if each.free_at > now or each.here}
        return self._budgets.setdefault(caller, Budget())

    async def _turn(self, budget: Budget) -> None:
        """Wait until the caller may cost something again."""
        while (wait_s := budget.free_at - self._clock()) > 0:
            if wait_s > LONGEST_WAIT_S:
                message = "large requests of this caller have used up its share of the time"
                raise ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=wait_s)
            await asyncio.sleep(wait_s)

    def _charge(self, budget: Budget, cost_s: float) -> None:
        budget.free_at = max(budget.free_at, self._clock() - AHEAD_S) + cost_s / SHARE


def of_others(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """A message of a service that is not the contract's."""
    if len(data) > OTHERS_BYTES:
        raise InvalidArgument.field("request", f"must be a message of up to {OTHERS_BYTES} bytes")
    try:
        return parse(data)
    except DecodeError:
        raise InvalidArgument.field("request", NO_MESSAGE) from None


def _parsed(kind: Descriptor, served: ServingState, data: bytes) -> Message:
    try:
        request = GetMessageClass(kind).FromString(data)
    except DecodeError:
        raise InvalidArgument.field("request", NO_MESSAGE) from None
    validate(served.limits, request)
    return request


def _bounds(served: ServingState) -> Limits:
    """What lists may hold. In a router, which has no model, that is what one of its engines would take."""
    if served.model is not None:
        return served.limits
    lengths = [each.engine.info.max_context_tokens for each in served.programs.dispatcher.engines.handles.values()]
    return replace(served.limits, max_context_tokens=max([LONGEST_CONTEXT, *lengths]))


def _too_long() -> None:
    raise Long
