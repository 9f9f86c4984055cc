"""Mail between the step thread and asyncio: results out in batches, readers' progress back.

The step thread never waits for a reader: it posts callbacks to an `CallbackQueue` and flushes once per turn, one wake-up per
event loop however many streams got something. A reader that keeps up sees every piece by itself; one that does not sees
fewer, larger ones, and if it lags more than `limit` tokens behind, its sequences pause. Nobody else notices.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jaxctx.types import GeneratePiece

Callback = Callable[[], None]


class CallbackQueue:
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
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_run_all, callbacks)


def _run_all(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        callback()


class ResultFuture:
    """Where a sequence's results go: a future of one loop, settled from the step thread unless its waiter has gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: CallbackQueue) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()
        self._post = partial(outbox.post, loop)

    def done(self, result: Any) -> None:
        """The end: of a fill, pass or opening with its result, of a generation with None after its last piece."""
        self._post(lambda: None if self.future.done() else self.future.set_result(result))

    def failed(self, error: Exception) -> None:
        """The end, with an error. Nothing follows."""
        self._post(lambda: None if self.future.done() else self.future.set_exception(error))

    def piece(self, piece: GeneratePiece) -> None:
        """A token of an output. Only a generation has any, and what it is given is a `OutputStream`."""
        raise TypeError("nothing but a generation has pieces")

    def backpressured(self) -> bool:
        """Whether the reader is too far behind to take more."""
        return False


class OutputStream(ResultFuture):
    """Pieces of the outputs of one request, on their way to one reader; what is promised is their end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, outbox: CallbackQueue, *, outputs: int, limit: int, wake: Callback
    ) -> None:
        super().__init__(loop, outbox)
        self._limit = limit * outputs
        self._most = limit  # tokens that are joined into one piece
        self._wake_engine = wake
        # Step thread's side.
        self._open = outputs
        self._sent = 0
        self._lagged = False
        # Reader's side.
        self._waiting: dict[int, list[GeneratePiece]] = {}  # by the index of the output
        self._arrived = asyncio.Event()
        self._read = 0
        self.future.add_done_callback(self._ended)

    def piece(self, piece: GeneratePiece) -> None:
        self._sent += 1
        self._post(partial(self._arrive, piece))

    def done(self, result: None) -> None:
        self._open -= 1
        if self._open == 0:  # but the first failure of an output is that of the request
            super().done(result)

    def backpressured(self) -> bool:
        if self._sent - self._read <= self._limit:
            return False
        self._lagged = True  # before the last look, so that a reader who catches up wakes the engine
        return self._sent - self._read > self._limit

    def _arrive(self, piece: GeneratePiece) -> None:
        self._waiting.setdefault(piece.index, []).append(piece)
        self._arrived.set()

    def _ended(self, future: asyncio.Future[None]) -> None:
        future.exception()  # is looked at here, for the reader may have left
        self._arrived.set()

    async def pieces(self) -> AsyncIterator[GeneratePiece]:
        """What arrives, as one piece what waits of an output; raises what the request failed with, after the rest."""
        while True:
            while self._waiting:
                index, parts = next(iter(self._waiting.items()))
                del self._waiting[index]
                if more := parts[self._most :]:
                    self._waiting[index] = more  # behind those of other outputs
                piece = _joined(parts[: self._most])
                self._read += len(piece.token_ids)
                if self._lagged and self._sent - self._read <= self._limit // 2:
                    self._lagged = False
                    self._wake_engine()
                yield piece
            if self.future.done():
                self.future.result()
                return
            self._arrived.clear()
            await self._arrived.wait()


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
