"""The asyncio client: the blocking one with `await`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from jaxctx.client.clients import ClientOperations
from jaxctx.client.contexts import ContextOperations
from jaxctx.client.drive import Asynchronous
from jaxctx.client.sessions import SessionOperations, VariableOperations
from jaxctx.client.streams import Piece, Pieces


class Stream(Pieces["Context"], Asynchronous, AsyncIterator["Piece[Context]"]):
    """As `jaxctx.Stream`, with `async for`."""

    async def __anext__(self) -> Piece[Context]:
        piece = await self._next_piece()
        if piece is None:
            raise StopAsyncIteration
        return piece


class Context(ContextOperations["Context", Stream], Asynchronous):
    """As `jaxctx.Context`, with `await` and `async with`. One task at a time."""

    _stream = Stream


class Variable(VariableOperations, Asynchronous):
    """As `jaxctx.Variable`, with `await`."""


class Session(SessionOperations[Variable], Asynchronous):
    """As `jaxctx.Session`, with `await` and `async with`."""

    _variable_class = Variable


class Client(ClientOperations[Context, Session], Asynchronous):
    """As `jaxctx.Client`, with `await` and `async with`. To be made where an event loop runs."""

    _transport = grpc.aio
    _context_class = Context
    _session_class = Session
