"""Several streams read at once, few at a time: the prompts of one request, or its questions."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_WAITING_VALUES = 64  # of all streams, until they are read


@dataclass(frozen=True, slots=True)
class Interleaved(Generic[T]):
    """A value, and of which stream."""

    source: int  # from 0
    value: T


async def interleave(
    sources: Sequence[Callable[[], AsyncGenerator[T, None]]], at_once: int
) -> AsyncGenerator[Interleaved[T], None]:
    """The values of all streams as they come. `at_once` streams are open at a time, the first ones first.

    The first error ends all. To be closed as soon as it is no longer read.
    """
    waiting: asyncio.Queue[Interleaved[T] | Exception | None] = asyncio.Queue(MAX_WAITING_VALUES)
    places = iter(range(len(sources)))

    async def work() -> None:
        """Read one stream after the other. Ends with an error or None."""
        try:
            for place in places:
                async with aclosing(sources[place]()) as values:
                    async for value in values:
                        await waiting.put(Interleaved(place, value))
        except Exception as error:
            await waiting.put(error)
        else:
            await waiting.put(None)

    running = min(len(sources), max(at_once, 1))
    workers = [asyncio.create_task(work()) for _ in range(running)]
    try:
        while running:
            each = await waiting.get()
            if isinstance(each, Exception):
                raise each
            if each is None:
                running -= 1
            else:
                yield each
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
