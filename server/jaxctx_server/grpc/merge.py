"""Merging: pieces that wait for a slow reader become fewer, larger ones.

A pump takes pieces from the engine as they come; whoever reads gets all that came since, those of one output as one.
So a fast reader sees every piece by itself and a slow one sees few. About `MAX_WAITING` tokens wait here at most: then
the pump stops, and with it, once the engine's own buffer is full, the work on this request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from jaxctx.engine.interface import GeneratePiece

MAX_WAITING = 256  # tokens of one stream


async def merged(pieces: AsyncIterator[GeneratePiece]) -> AsyncGenerator[GeneratePiece, None]:
    """The same outputs in as few pieces as wait. Closing it closes `pieces`, and returns when that is done."""
    buffer = _Buffer()
    pump = asyncio.create_task(_pump(pieces, buffer))
    try:
        while waiting := await buffer.take():
            for piece in waiting:
                yield piece
        await pump  # raises what ended the pieces
    finally:
        pump.cancel()
        await asyncio.wait((pump,))
        if not pump.cancelled():
            pump.exception()  # seen; whoever left early does not want it


async def _pump(pieces: AsyncIterator[GeneratePiece], buffer: _Buffer) -> None:
    try:
        async with aclosing(cast(AsyncGenerator[GeneratePiece, None], pieces)):
            async for piece in pieces:
                await buffer.put(piece)
    finally:
        buffer.end()


class _Buffer:
    """Pieces that wait, one for each output, in the order in which the outputs' first ones came."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[GeneratePiece]] = {}
        self._tokens = 0
        self._ended = False
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    async def put(self, piece: GeneratePiece) -> None:
        """Add a piece, once there is room."""
        while self._tokens >= MAX_WAITING:
            self._emptied.clear()
            await self._emptied.wait()
        self._waiting.setdefault(piece.index, []).append(piece)
        self._tokens += 1 + len(piece.token_ids)
        self._filled.set()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._filled.set()

    async def take(self) -> list[GeneratePiece]:
        """All that waits, at least one piece; none at the end."""
        while not self._waiting and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        taken = [_joined(parts) for parts in self._waiting.values()]
        self._waiting.clear()
        self._tokens = 0
        self._emptied.set()
        return taken


def _joined(parts: list[GeneratePiece]) -> GeneratePiece:
    """Consecutive pieces of one output as one. Only the last can have what ends an output."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
    )
