"""Merging: pieces that wait for a slow reader become fewer, larger ones.

A pump takes pieces from the engine as they come; whoever reads gets all that came since, those of one output as one.
So a fast reader sees every piece by itself and a slow one sees few. At most `MAX_WAITING` pieces wait here: then the
pump stops, and with it, once the engine's own buffer is full, the work on this request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from jaxctx.engine.interface import GeneratePiece

MAX_WAITING = 128  # pieces of one stream, of a token each as a rule


async def merged(pieces: AsyncIterator[GeneratePiece]) -> AsyncGenerator[GeneratePiece, None]:
    """The same outputs in as few pieces as wait. Closing it closes `pieces`, and returns when that is done."""
    waiting: asyncio.Queue[GeneratePiece | None] = asyncio.Queue()  # None: no more will come
    room = asyncio.Semaphore(MAX_WAITING)

    async def pump() -> None:
        try:
            async with aclosing(cast(AsyncGenerator[GeneratePiece, None], pieces)):
                async for piece in pieces:
                    await room.acquire()
                    waiting.put_nowait(piece)
        finally:
            waiting.put_nowait(None)

    pumping = asyncio.create_task(pump())
    try:
        more = True
        while more:
            taken = [await waiting.get()]
            while not waiting.empty():
                taken.append(waiting.get_nowait())
            more = taken[-1] is not None
            outputs: dict[int, list[GeneratePiece]] = {}
            for piece in taken:
                if piece is not None:
                    room.release()
                    outputs.setdefault(piece.index, []).append(piece)
            for parts in outputs.values():
                yield _joined(parts)
        await pumping  # raises what ended the pieces
    finally:
        pumping.cancel()
        await asyncio.wait((pumping,))
        if not pumping.cancelled():
            pumping.exception()  # seen; whoever left early does not want it


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
