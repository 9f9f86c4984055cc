"""Several calls at once: the one place where the two clients differ by more than words.

Calls of the asyncio client run together. The blocking client, which is generated from it, has made them one after
another by the time that there is a list of them.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def gather_all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """The results of calls that run together.

    Raises the first error once every call has ended, so that none still works on a context.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # there is no error among them


def in_turn(results: list[T]) -> list[T]:
    """The blocking client's `await gather_all`: its list of calls is one of results."""
    return results
