"""Commands for the step thread: results, errors, cancellation, and their end. Without a device."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest

from jaxctx.engine.core.step_loop import StepLoop
from jaxctx.errors import NotFound, Unavailable


class IdleCore:
    """As much of a core as a loop needs that has nothing to send."""

    def __init__(self) -> None:
        self.closed = False
        self.failed_with: list[Exception] = []

    def on_arrival(self, wake: Any) -> None:
        self.wake = wake

    def on_masks(self, post: Any) -> None:
        self.post = post

    def count_compilations(self) -> Any:
        return nullcontext()

    def expire(self) -> float:
        return 60.0

    def expire_contexts(self) -> None:
        pass

    def can_dispatch(self) -> bool:
        return True

    def may_dispatch_again(self) -> bool:
        return False

    def dispatch(self) -> None:
        return None

    def dispatch_drafts(self) -> None:
        return None

    def carry_out_moves(self) -> None:
        pass

    def fail_all(self, error: Exception) -> None:
        self.failed_with.append(error)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
async def loop() -> AsyncIterator[StepLoop]:
    core: Any = IdleCore()
    loop = StepLoop(core)
    loop.start()
    yield loop
    await asyncio.to_thread(loop.stop)


async def test_a_call_runs_on_the_step_thread_and_returns_its_result(loop: StepLoop) -> None:
    assert await loop.call(lambda: threading.current_thread().name) == "jaxctx-step"
    assert await loop.call(divmod, 7, 2) == (3, 1)


async def test_an_error_of_a_command_is_its_callers_alone(loop: StepLoop) -> None:
    def refuse() -> None:
        raise NotFound("no such context")

    with pytest.raises(NotFound):
        await loop.call(refuse)
    assert await loop.call(int) == 0
    assert not loop.failure.done()


async def test_commands_keep_their_order(loop: StepLoop) -> None:
    seen: list[int] = []
    for number in range(100):
        loop.post(lambda number=number: seen.append(number))
    await loop.call(int)
    assert seen == list(range(100))


async def test_an_error_of_a_posted_command_fails_the_engine(loop: StepLoop) -> None:
    loop.post(lambda: 1 // 0)
    with pytest.raises(Unavailable) as error:
        for _ in range(100):
            await loop.call(int)
    assert error.value.reason == "ENGINE_FAILED"
    core: Any = loop.core
    assert [type(each) for each in core.failed_with] == [Unavailable]


async def test_a_stopped_loop_refuses(loop: StepLoop) -> None:
    await asyncio.to_thread(loop.stop)
    core: Any = loop.core
    assert core.closed
    with pytest.raises(Unavailable):
        await loop.call(int)
    loop.post_if_running(int)  # nothing happens
    loop.wake()
