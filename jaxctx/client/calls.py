"""What both clients need around a call: how its cancellation is told, and the time that is left of an operation."""

import asyncio
import time

from jaxctx.errors import Cancelled, DeadlineExceeded

CALL_CANCELLED = asyncio.CancelledError  # what awaiting a call of the asyncio client raises if somebody cancels it


def raise_if_closed() -> None:
    """Raise Cancelled if the present task has met CALL_CANCELLED and was not cancelled itself.

    Closing the asyncio client cancels its calls, which looks to whoever awaits one as if its own task had been
    cancelled. The blocking client, which has no tasks, never calls this.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() == 0:
        raise Cancelled("the call was cancelled: the client was closed") from None


class Deadline:
    """The end of an operation that may make several calls."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s` from now; None: never."""
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """The time that is left for the next call; None: it never ends. Raises DeadlineExceeded if there is none.

        A call without any time may succeed all the same, if the answer is there before gRPC looks at the clock.
        """
        if self._at is None:
            return None
        remaining_s = self._at - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the server was done with a call that was cut short")
        return remaining_s

    def at_most_s(self, pause_s: float) -> float:
        """This pause, or what is left if that is less."""
        return pause_s if self._at is None else min(pause_s, max(0.0, self._at - time.monotonic()))
