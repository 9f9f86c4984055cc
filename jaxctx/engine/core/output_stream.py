"""Output streams: results from the step thread to asyncio, in batches, with backpressure from slow readers.

The step thread never waits for a reader: it posts callbacks to a `CallbackQueue` and flushes the queue once per
iteration, which wakes each event loop once, however many streams have new pieces. A reader that keeps up gets each
piece alone. A slower one gets fewer, larger pieces; if it is more than `limit` tokens behind, its requests pause
(backpressure). Other requests are not affected.
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
        """Run the posted callbacks on their loops. Callbacks for a closed loop are dropped: it has no reader."""
        waiting, self._waiting = self._waiting, {}
        for loop, callbacks in waiting.items():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_run_all, callbacks)


def _run_all(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        callback()


class ResultFuture:
    """The future result of a request, on one event loop. The step thread sets it, unless the waiter has cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callbacks: CallbackQueue) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()
        self._post = partial(callbacks.post, loop)

    def set_result(self, result: Any) -> None:
        """End with a result: that of a fill, forward or opening; None for a generation, after its last piece."""
        self._post(partial(self._resolve, result))

    def set_error(self, error: Exception) -> None:
        """End with an error. Nothing follows."""
        self._post(partial(self._reject, error))

    def add_piece(self, piece: GeneratePiece) -> None:
        """Send a piece of an output. Only generations have pieces, and their reply is an `OutputStream`."""
        raise TypeError("only a generation has pieces")

    def backpressured(self) -> bool:
        """Whether the reader is too far behind to take more."""
        return False

    def _resolve(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _reject(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class OutputStream(ResultFuture):
    """Pieces of the outputs of one request, for one reader. Its future is set when all outputs have ended.

    The two sides share two counters: the step thread alone writes `_sent_tokens`, the reader alone `_read_tokens`.
    `backpressured` only compares them. The reader wakes the engine when it comes back to half of the limit. It cannot
    miss that time: it reads `_sent_tokens` after it has written `_read_tokens`. If the engine found the stream
    backpressured, the reader was more than `limit` behind at that time, so exactly one of its later reads takes it from
    above half of the limit to below, and that one wakes the engine. A wake-up without need does no harm.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        callbacks: CallbackQueue,
        *,
        outputs: int,
        limit: int,
        wake: Callback,
    ) -> None:
        """`limit`: tokens of each output that the reader may be behind. `wake` makes the engine check for work."""
        super().__init__(loop, callbacks)
        self._limit = limit * outputs
        self._max_joined = limit  # pieces that are joined into one
        self._wake_engine = wake
        # Written by the step thread.
        self._open_outputs = outputs
        self._sent_tokens = 0
        # Written by the reader.
        self._waiting: dict[int, list[GeneratePiece]] = {}  # by the index of the output
        self._arrived = asyncio.Event()
        self._read_tokens = 0
        self.future.add_done_callback(self._ended)

    def add_piece(self, piece: GeneratePiece) -> None:
        self._sent_tokens += 1
        self._post(partial(self._arrive, piece))

    def set_result(self, result: None) -> None:
        """One output has ended. The first failure of an output, however, is the failure of the request."""
        self._open_outputs -= 1
        if self._open_outputs == 0:
            super().set_result(result)

    def backpressured(self) -> bool:
        return self._sent_tokens - self._read_tokens > self._limit

    def _arrive(self, piece: GeneratePiece) -> None:
        self._waiting.setdefault(piece.index, []).append(piece)
        self._arrived.set()

    def _ended(self, future: asyncio.Future[None]) -> None:
        future.exception()  # marks the error as seen, for the reader may have left
        self._arrived.set()

    async def pieces(self) -> AsyncIterator[GeneratePiece]:
        """Pieces as they arrive; those that wait of one output come as one. At the end raises the request's error."""
        while True:
            while self._waiting:
                piece = self._take_waiting()
                self._mark_read(len(piece.token_ids))
                yield piece
            if self.future.done():
                self.future.result()
                return
            self._arrived.clear()
            await self._arrived.wait()

    def _take_waiting(self) -> GeneratePiece:
        """The waiting pieces of the output whose turn it is, joined into one."""
        index, pieces = next(iter(self._waiting.items()))
        del self._waiting[index]
        rest = pieces[self._max_joined :]
        if rest:
            self._waiting[index] = rest  # behind the other outputs
        return _join(pieces[: self._max_joined])

    def _mark_read(self, tokens: int) -> None:
        """Count tokens as read; wake the engine if that takes the reader back to half of the limit."""
        read_before = self._read_tokens
        self._read_tokens = read_before + tokens
        sent = self._sent_tokens  # only now: see the class docstring
        threshold = self._limit // 2
        if sent - read_before > threshold >= sent - self._read_tokens:
            self._wake_engine()


def _join(pieces: list[GeneratePiece]) -> GeneratePiece:
    """Consecutive pieces of one output as one. Only the last can have what ends an output, and the first its usage."""
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        pieces[-1],
        usage=pieces[-1].usage or pieces[0].usage,
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
    )
