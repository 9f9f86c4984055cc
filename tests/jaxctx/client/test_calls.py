"""How a cancelled call is told, and the time that is left of an operation. The clients' tests have both in use."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.client.calls import CALL_CANCELLED, MAX_TIMEOUT_S, Deadline, grpc_timeout_s, raise_if_closed


async def told(call: Awaitable[Any]) -> Any:
    """As the client awaits a call."""
    try:
        return await call
    except CALL_CANCELLED:
        raise_if_closed()
        raise


async def test_a_task_that_is_cancelled_stays_so() -> None:
    task = asyncio.create_task(told(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_is_cancelled_is_an_error_of_its_task() -> None:
    call = asyncio.get_running_loop().create_future()
    call.cancel()
    with pytest.raises(errors.Cancelled) as raised:
        await told(call)
    assert raised.value.__cause__ is None


async def test_a_time_limit_around_a_call_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await told(asyncio.Event().wait())


def test_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    deadline = Deadline(5.0)
    now[0] += 4.0
    assert (deadline.remaining_s(), deadline.at_most_s(0.5), deadline.at_most_s(2.0)) == (1.0, 0.5, 1.0)
    now[0] += 4.0
    assert deadline.at_most_s(0.5) == 0.0
    with pytest.raises(errors.DeadlineExceeded):
        deadline.remaining_s()
    for endless in (Deadline(None), Deadline(math.inf)):
        assert (endless.remaining_s(), endless.at_most_s(0.5)) == (math.inf, 0.5)


def test_timeouts_as_grpc_takes_them() -> None:
    for given, taken in ((None, None), (math.inf, None), (0.0, 0.0), (2.5, 2.5), (1e10, MAX_TIMEOUT_S), (-1.0, -1.0)):
        assert grpc_timeout_s(given) == taken
    with pytest.raises(errors.InvalidArgument) as raised:
        grpc_timeout_s(math.nan)
    assert [each.field for each in raised.value.violations] == ["timeout_s"]
