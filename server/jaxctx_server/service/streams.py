"""Streams of an engine, closed at once when their reader leaves."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar, cast

T = TypeVar("T")


def closing(stream: AsyncIterator[T]) -> "aclosing[AsyncGenerator[T, None]]":
    """A context manager that closes a stream of the Engine interface at its end, which ends the work behind it.

    The interface promises that its streams can be closed, though not in their type.
    """
    return aclosing(cast("AsyncGenerator[T, None]", stream))
