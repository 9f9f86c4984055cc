"""The asyncio client: the blocking one with `await`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from jaxctx.client.clients import ClientSteps
from jaxctx.client.contexts import ContextSteps
from jaxctx.client.drive import Asynchronous
from jaxctx.client.link import ASYNCIO
from jaxctx.client.streams import Piece, Pieces


class Stream(Pieces["Context"], Asynchronous, AsyncIterator["Piece[Context]"]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    async def __anext__(self) -> Piece[Context]:
        piece = await self._next_piece()
        if piece is None:
            raise StopAsyncIteration
        return piece


class Context(ContextSteps["Context", Stream], Asynchronous):
    """A context on the server: its id, its counters as of the last answer, and what can be done with it.

    Made by `Client.create`, `Client.context`, `Client.open` and `fork`. Leaving its `async with` block closes it;
    otherwise it lives on until `close`. One task at a time; other clients may use the same context: of two writers one
    gets Aborted.
    """

    _stream = Stream


class Client(ClientSteps[Context], Asynchronous):
    """A connection to a jaxctx server. Every method may raise the errors of `jaxctx.errors`.

    As `jaxctx.Client`, with `await`; made where an event loop runs. Leaving the `async with` block closes the
    connection; contexts live on.
    """

    _transport = ASYNCIO
    _context_class = Context
