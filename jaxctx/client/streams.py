"""Outputs of a context: the pieces of one Generate call as they come, and joined."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from jaxctx.answers import ContextInfo, FinishReason, GeneratePiece, Usage, named
from jaxctx.client.drive import run
from jaxctx.codec import decode
from jaxctx.errors import Cancelled, DeadlineExceeded, Internal, JaxctxError, Unavailable

if TYPE_CHECKING:
    from jaxctx.client.contexts import ContextOperations

C = TypeVar("C", covariant=True)
V = TypeVar("V", bound="ContextOperations[Any, Any]")

# After these the server may still be at work on the call, for at most one step of the engine.
CUT_SHORT = (DeadlineExceeded, Cancelled, Unavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(GeneratePiece, Generic[C]):
    """A part of one output; `str(piece)` is its text.

    `context` is the object that holds this output: the one generated from, or with n > 1 the output's own fork. The
    last piece of an output has `finish`, `seed` and `usage`, and only then are the context's counters new.
    """

    context: C  # type: ignore[assignment]  # the messages' are its counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(GeneratePiece, Generic[C]):
    """A whole output; `str(completion)` is its text."""

    context: C  # type: ignore[assignment]
    finish: FinishReason
    usage: Usage


class Pieces(Generic[V]):
    """Either client's stream: finds or makes the object of each output's context, and keeps its counters new."""

    def __init__(self, source: V, begin: Callable[[], Any]) -> None:
        self._contexts = {source.id: source}
        self._source = source
        self._begin = begin
        self._ended = False
        # Begun here unless something must be awaited first, so that streams made one after the other run together.
        if source.cut_short and source._link.is_blocking:
            run(source._settle())
        self._call = None if source.cut_short else begin()

    async def _next_piece(self) -> Piece[V] | None:
        """None after the last one."""
        if self._ended:
            return None
        if self._call is None:
            await self._source._settle()
            self._call = self._begin()
        try:
            response = await self._source._link.read(self._call)
        except (*CUT_SHORT, asyncio.CancelledError):
            self.close()
            raise
        except JaxctxError:
            self._ended = True
            raise
        if response is None:
            self._ended = True
            return None
        context = self._contexts.get(response.context_id)
        if context is None:
            context = self._contexts[response.context_id] = self._source._another(response.context_id)
        if response.HasField("context"):
            context.learn(decode(response.context, ContextInfo))
        return decode(response, Piece, context=context)

    def close(self) -> None:
        """Cancel the rest. Idempotent; nothing happens after the last piece."""
        if not self._ended:
            self._ended = True
            if self._call is not None:
                self._call.cancel()
                for context in self._contexts.values():  # the server may hold them for a moment longer
                    context.cut_short = True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end, gRPC or the event loop may be gone before us
            self.close()


def joined(index: int, pieces: list[Piece[C]]) -> Completion[C]:
    """All pieces of an output as one. Raises Internal if it has no end."""
    last = pieces[-1] if pieces else None
    if last is None or last.finish is None or last.usage is None:
        raise Internal(f"the stream ended before output {index} did")
    whole = {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": tuple(token for piece in pieces for token in piece.token_ids),
        "logprobs": tuple(logprob for piece in pieces for logprob in piece.logprobs),
    }
    return Completion(**named(Completion, last) | whole)
