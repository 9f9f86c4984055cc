"""Running a loop with either client. Where a loop yields a list, its calls run together on asyncio, else in order."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Loop = Generator[Any, Any, R]  # yields what a client's method returned, and is sent the result


def blocking(loop: Callable[P, Loop[R]]) -> Callable[P, R]:
    """The loop as a function over contexts of the blocking client, whose methods return results."""

    @functools.wraps(loop)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        running, result = loop(*args, **kwargs), None
        while True:
            try:
                result = running.send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    return run


def asynchronous(loop: Callable[P, Loop[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The loop as a coroutine function over contexts of the asyncio client, whose methods are to be awaited."""

    @functools.wraps(loop)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        running = loop(*args, **kwargs)
        send: Callable[[Any], Any] = running.send
        result: Any = None
        while True:
            try:
                call = send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                send, result = running.send, await (_together(call) if isinstance(call, list) else call)
            except (Exception, asyncio.CancelledError) as error:  # after cancelling too the loop has to clean up
                send, result = running.throw, error

    return run


async def _together(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results, or the first error once every call has ended: none is left behind at work on a context."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
