"""Calls that run together, and that a call which fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest

from jaxctx.client.gathering import gather_all, in_turn
from jaxctx.errors import Aborted


async def test_an_error_keeps_nothing_alive(either: Any, client: Any, fake: Any) -> None:
    """A stream that the failing function had is cancelled when it is dropped, not when garbage is collected."""
    context, other = await either(client.create("hello")), await either(client.create("hello"))
    streams: list[weakref.ref[Any]] = []

    async def work() -> None:
        stream = other.generate()
        streams.append(weakref.ref(stream))
        await either(context.fill("!"))

    fake.fail_before["Fill"] = [Aborted("busy")]
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

    async def fails() -> str:
        raise Aborted("busy")

    async def takes_longer() -> str:
        await asyncio.sleep(0.01)
        ended.append("longer")
        return "done"

    with pytest.raises(Aborted):
        await gather_all([fails(), takes_longer()])
    assert ended == ["longer"]
    assert await gather_all([takes_longer(), takes_longer()]) == ["done", "done"]
    assert in_turn(["done", "done"]) == ["done", "done"]


async def test_an_iteration_of_the_blocking_client_that_is_left_ends_its_call_at_once(
    either: Any, client: Any, fake: Any
) -> None:
    """And so does one of the asyncio client that is closed."""
    await either(client.create("hello"))
    changes = client.watch()
    await either.next(changes)
    await either(changes.close() if either.kind == "blocking" else changes.aclose())
    assert await asyncio.to_thread(fake.cancelled.wait, 5)
    assert await either.list(changes) == []


def test_the_blocking_client_makes_no_event_loop(serving: Any) -> None:
    program = f"""
import asyncio

def refused(*_):
    raise AssertionError("an event loop")

asyncio.new_event_loop = asyncio.get_event_loop = asyncio.BaseEventLoop.__init__ = refused
import jaxctx
with jaxctx.Client({serving.target!r}) as client, client.create("hello") as context:
    print(context.complete().text, len(list(client.contexts())), len(jaxctx.decoding.best_of(context, 2).text))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout.split()) == (0, ["abcdef", "1", "6"]), result.stderr
