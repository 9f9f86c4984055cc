"""How a cancelled call is told, and the time that is left of an operation. The clients' tests have both in use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.client.calls import CALL_CANCELLED, Deadline, raise_if_closed


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
    endless = Deadline(None)
    assert (endless.remaining_s(), endless.at_most_s(0.5)) == (None, 0.5)
