"""The blocking and the asyncio client, driven the same way, so that one test is of both."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import jaxctx


class EitherClient:
    """One of the two clients: `await either(value)` is the value itself, or the result of awaiting it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # "blocking" or "aio"
        self.open: list[Any] = []  # all clients that were made

    def client(self, target: str, **options: Any) -> Any:
        """A client of this kind, connected to `target`."""
        client: Any = (
            jaxctx.Client(target, **options) if self.kind == "blocking" else jaxctx.aio.Client(target, **options)
        )
        self.open.append(client)
        return client

    async def __call__(self, value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def each(self, stream: Any) -> AsyncIterator[Any]:
        """The items of an iterable or asynchronous iterable."""
        if self.kind == "blocking":
            for item in stream:
                yield item
        else:
            async for item in stream:
                yield item

    @property
    def decoding(self) -> Any:
        """The module of decoding algorithms for this kind of client."""
        return jaxctx.decoding if self.kind == "blocking" else jaxctx.aio.decoding

    async def list(self, stream: Any) -> list[Any]:
        """All items of an iterable or asynchronous iterable."""
        return [item async for item in self.each(stream)]

    async def next(self, stream: Any) -> Any:
        """The next item of an iterator or asynchronous iterator."""
        return next(stream) if self.kind == "blocking" else await anext(stream)

    async def enter(self, manager: Any) -> Any:
        """Enter a context manager, blocking or asynchronous."""
        return manager.__enter__() if self.kind == "blocking" else await manager.__aenter__()

    async def exit(self, manager: Any, error: BaseException | None = None) -> Any:
        """Leave a context manager, with the error that was raised in it, if one was."""
        arguments = (type(error) if error else None, error, None)
        return manager.__exit__(*arguments) if self.kind == "blocking" else await manager.__aexit__(*arguments)
