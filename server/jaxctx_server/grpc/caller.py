"""The caller of a running method: whose tenant it serves, and until when."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

import grpc

from jaxctx.engine.interface import Caller
from jaxctx_server.auth import Key
from jaxctx_server.services import make_caller

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
CURRENT_KEY: ContextVar[Key] = ContextVar("key")  # of the call that the running task serves; set by the interceptor


class CallerFactory:
    """Makes the Caller of a call that the interceptor has admitted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is that of the engine's deadlines, in seconds."""
        self._clock = clock

    def caller(self, context: Context) -> Caller:
        """Tenant, deadline and trace of the running call."""
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
        return make_caller(CURRENT_KEY.get(), self._clock, remaining_s)
