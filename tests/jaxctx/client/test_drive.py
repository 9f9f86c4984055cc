"""Programs leave nothing behind; those of the blocking client never wait, and need no event loop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from jaxctx.client.drive import blocking, blocking_items, outcome, outcomes
from jaxctx.errors import Aborted


async def test_an_error_keeps_nothing_alive() -> None:
    """A stream that the failing function had is cancelled when it is dropped, not when garbage is collected."""

    async def failing_call() -> None:
        raise Aborted("busy")

    async def program() -> None:
        await outcome(failing_call())

    class Stream:
        pass

    streams: list[weakref.ref[Stream]] = []

    async def work() -> None:
        stream = Stream()
        streams.append(weakref.ref(stream))
        await program()

    gc.disable()
    try:
        with pytest.raises(Aborted):
            await work()
        await asyncio.sleep(0)
        assert streams[0]() is None
    finally:
        gc.enable()


async def test_of_calls_that_run_together_none_is_left_behind_by_an_error_of_another() -> None:
    ended: list[str] = []

    async def fails() -> None:
        raise Aborted("busy")

    async def takes_longer() -> str:
        await asyncio.sleep(0.01)
        ended.append("longer")
        return "done"

    with pytest.raises(Aborted):
        await outcomes([fails(), takes_longer()])
    assert ended == ["longer"]
    assert await outcomes([takes_longer(), takes_longer()]) == ["done", "done"]


def test_an_iteration_of_the_blocking_client_that_is_left_ends_its_program_at_once() -> None:
    ended: list[int] = []

    async def program(count: int) -> AsyncIterator[int]:
        try:
            for number in range(count):
                yield await outcome(number)
        finally:
            ended.append(count)

    numbers = blocking_items(program)
    assert list(numbers(3)) == [0, 1, 2]
    left = numbers(5)
    assert next(left) == 0
    left.close()
    assert ended == [3, 5]


def test_a_program_of_the_blocking_client_that_waits_is_a_defect() -> None:
    async def program() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits"):
        blocking(program)()
