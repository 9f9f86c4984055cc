"""What both clients need around a call: its errors, and the time that is left of an operation of several calls."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from jaxctx.errors import Cancelled
from jaxctx.rpc import from_rpc_error


@contextmanager
def call_errors() -> Iterator[None]:
    """While entered, errors of gRPC are raised as those of `jaxctx.errors`.

    Closing a channel of the asyncio client cancels its calls, which looks to whoever awaits one as if its own task had
    been cancelled. It was not, and gets Cancelled, as in the blocking client.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        raise Cancelled("the call was cancelled: the client was closed") from None


class Deadline:
    """The end of an operation that may make several calls."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s` from now; None: never."""
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """The time that is left, 0 if none is; None: it never ends."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def at_most_s(self, pause_s: float) -> float:
        """This pause, or what is left if that is less."""
        remaining_s = self.remaining_s()
        return pause_s if remaining_s is None else min(pause_s, remaining_s)
