"""Outputs of a context: the pieces of one Generate call, and joined. The same for both clients."""

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxctx.errors import Cancelled, DeadlineExceeded, Internal, Unavailable
from jaxctx.types import FinishReason, GeneratePiece, Usage, named

C = TypeVar("C", covariant=True)

# After these the server may still be at work on the call, for at most one step of the engine. Tasks alone
# are ended by the last of them.
CUT_SHORT = (DeadlineExceeded, Cancelled, Unavailable, asyncio.CancelledError)


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
