"""Mail between the step thread and asyncio: results out in batches, readers' progress back.

The step thread never waits for a reader: it posts callbacks to an `Outbox` and flushes once per turn, one wake-up per
event loop however many streams got something. A reader that lags more than `limit` tokens behind makes its sequences
pause; nothing is dropped, nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from jaxctx.engine.interface import FillResult, GeneratePiece
from jaxctx.errors import JaxctxError

Callback = Callable[[], None]


class Outbox:
    """Callbacks for event loops, collected on the step thread."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.AbstractEventLoop, list[Callback]] = {}

    def post(self, loop: asyncio.AbstractEventLoop, callback: Callback) -> None:
        """Run `callback` on `loop` after the next flush."""
        self._waiting.setdefault(loop, []).append(callback)

    def flush(self) -> None:
        """Send what was posted. A loop that has been closed takes its readers with it."""
        waiting, self._waiting = self._waiting, {}
        for loop, callbacks in waiting.items():
            try:
                loop.call_soon_threadsafe(_run_all, callbacks)
            except RuntimeError:
                continue


def _run_all(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        callback()


class Promise:
    """A future of one loop, settled from the step thread. Is the `Reply` of a fill."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()
        self._loop = loop
        self._outbox = outbox

    def done(self, result: Any) -> None:
        """Resolve it, unless the waiter has gone."""
        self._outbox.post(self._loop, partial(self._resolve, result, None))

    def failed(self, error: BaseException) -> None:
        """Raise `error` where it is awaited."""
        self._outbox.post(self._loop, partial(self._resolve, None, error))

    def piece(self, piece: GeneratePiece) -> None:
        """Fills have none."""
        raise AssertionError("a fill streams nothing")

    def lagging(self) -> bool:
        """A future holds one value; it cannot lag."""
        return False

    def _resolve(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class Stream:
    """Pieces of the outputs of one request, on their way to one reader. Is the `Reply` of its generations."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, outbox: Outbox, *, outputs: int, limit: int, wake: Callback
    ) -> None:
        self._loop = loop
        self._outbox = outbox
        self._limit = limit * outputs
        self._wake_engine = wake
        # Step thread's side.
        self._open = outputs
        self._sent = 0
        self._lagged = False
        # Reader's side.
        self._pieces: deque[GeneratePiece] = deque()
        self._arrived = asyncio.Event()
        self._read = 0
        self._error: JaxctxError | None = None
        self._complete = False

    def piece(self, piece: GeneratePiece) -> None:
        """Send a piece."""
        self._sent += len(piece.token_ids)
        self._outbox.post(self._loop, partial(self._arrive, piece))

    def done(self, result: FillResult | None) -> None:
        """One output is complete."""
        self._open -= 1
        if self._open == 0:
            self._outbox.post(self._loop, self._finish)

    def failed(self, error: JaxctxError) -> None:
        """An output failed, and the request with it."""
        self._outbox.post(self._loop, partial(self._finish, error))

    def lagging(self) -> bool:
        """Called on the step thread. Raises the flag before the last look, so that a reader who catches up wakes it."""
        if self._sent - self._read <= self._limit:
            return False
        self._lagged = True
        return self._sent - self._read > self._limit

    def _arrive(self, piece: GeneratePiece) -> None:
        self._pieces.append(piece)
        self._arrived.set()

    def _finish(self, error: JaxctxError | None = None) -> None:
        self._error = self._error or error
        self._complete = True
        self._arrived.set()

    async def pieces(self) -> AsyncIterator[GeneratePiece]:
        """What arrives, in order; raises what the request failed with, after the pieces that came before."""
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._read += len(piece.token_ids)
                if self._lagged and self._sent - self._read <= self._limit // 2:
                    self._lagged = False
                    self._wake_engine()
                yield piece
            if self._complete:
                if self._error is not None:
                    raise self._error
                return
            self._arrived.clear()
            await self._arrived.wait()
