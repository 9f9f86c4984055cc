"""Programs run by either client leave nothing behind."""

import asyncio
import gc
import weakref

import pytest

from jaxctx.client.drive import run_async
from jaxctx.errors import Aborted


async def test_an_error_keeps_nothing_alive() -> None:
    """A stream that the failing function had is cancelled when it is dropped, not when garbage is collected."""

    async def failing_call() -> None:
        raise Aborted("busy")

    def program():
        yield failing_call()

    class Stream:
        pass

    streams: list[weakref.ref[Stream]] = []

    async def work() -> None:
        stream = Stream()
        streams.append(weakref.ref(stream))
        await run_async(program())

    gc.disable()
    try:
        with pytest.raises(Aborted):
            await work()
        await asyncio.sleep(0)
        assert streams[0]() is None
    finally:
        gc.enable()
