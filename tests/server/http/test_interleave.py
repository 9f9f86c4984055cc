"""Several streams at once: all values come, few are open, and the first error and the end of reading end all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import pytest

from jaxctx_server.http.interleave import interleave


class Streams:
    """Streams of numbers, and how many are open."""

    def __init__(self) -> None:
        self.open = 0
        self.most_open = 0

    async def numbers(self, first: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for number in range(first, first + 3):
                await asyncio.sleep(0)
                yield number
            if error is not None:
                raise error
        finally:
            self.open -= 1


async def test_all_values_come_in_the_order_of_their_stream() -> None:
    streams = Streams()
    found: dict[int, list[int]] = {}
    async with aclosing(interleave([partial(streams.numbers, 10 * place) for place in range(7)], 3)) as values:
        async for each in values:
            found.setdefault(each.source, []).append(each.value)
    assert found == {place: [10 * place, 10 * place + 1, 10 * place + 2] for place in range(7)}
    assert (streams.open, streams.most_open) == (0, 3)


async def test_the_first_error_ends_all() -> None:
    streams = Streams()
    sources = [partial(streams.numbers, 0), partial(streams.numbers, 0, ValueError("wrong"))]
    with pytest.raises(ValueError, match="wrong"):
        async with aclosing(interleave([*sources, *[partial(streams.numbers, 0)] * 50], 2)) as values:
            async for _ in values:
                pass
    assert streams.open == 0


async def test_who_stops_reading_ends_all() -> None:
    streams = Streams()
    values = interleave([partial(streams.numbers, 0)] * 100, 4)
    await anext(values)
    await values.aclose()
    assert streams.open == 0


async def test_one_at_a_time_at_least() -> None:
    streams = Streams()
    async with aclosing(interleave([partial(streams.numbers, 0)] * 3, 0)) as values:
        assert [each.source async for each in values] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    async with aclosing(interleave([], 4)) as values:
        assert [each async for each in values] == []
