"""Several calls at once, where the two clients differ by more than words.

Those of the asyncio client run together. Those of the blocking one, which is generated from it, have been made one
after another by the time that there is a list of them.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def gather_all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """The results of calls that run together; or the first error, once every call has ended: none is left behind at
    work on a context.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # there is no error among them


def in_turn(results: list[T]) -> list[T]:
    """In the blocking client's place of `await gather_all`: what was a list of calls is one of results there."""
    return results
