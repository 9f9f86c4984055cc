"""What both clients need around a call: how its cancellation is told, and the time that is left of an operation."""

import asyncio
import math
import time

from jaxctx.errors import Cancelled, DeadlineExceeded, InvalidArgument

MAX_TIMEOUT_S = 10 * 365 * 24 * 3600.0  # longer ones count as this: gRPC takes one of centuries for none at all
CALL_CANCELLED = asyncio.CancelledError  # what awaiting a call of the asyncio client raises if somebody cancels it


def raise_if_closed() -> None:
    """Raise Cancelled if the present task has met CALL_CANCELLED and was not cancelled itself.

    Closing the asyncio client cancels its calls, which looks to whoever awaits one as if its own task had been
    cancelled. The blocking client, which has no tasks, never calls this.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() == 0:
        raise Cancelled("the call was cancelled: the client was closed") from None


def grpc_timeout_s(timeout_s: float | None) -> float | None:
    """A caller's timeout, where None and infinity are no deadline, as gRPC takes it. Raises InvalidArgument for NaN."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if math.isnan(timeout_s):
        raise InvalidArgument.field("timeout_s", "must be a number of seconds; math.inf for no deadline")
    return min(timeout_s, MAX_TIMEOUT_S)


class Deadline:
    """The end of an operation that may make several calls."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s` from now; None, or infinity: never."""
        self._at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)

    def remaining_s(self) -> float:
        """The time that is left for the next call; infinity: it never ends. Raises DeadlineExceeded if there is none.

        A call without any time may succeed all the same, if the answer is there before gRPC looks at the clock.
        """
        remaining_s = self._at - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the server was done with a call that was cut short")
        return remaining_s

    def at_most_s(self, pause_s: float) -> float:
        """This pause, or what is left if that is less."""
        return min(pause_s, max(0.0, self._at - time.monotonic()))
