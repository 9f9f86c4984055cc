"""Outputs of a context: the pieces of one Generate call, and whole outputs. The same for both clients."""

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxctx import convert
from jaxctx.errors import Cancelled, DeadlineExceeded, Internal, Unavailable
from jaxctx.types import FinishReason, GeneratePiece, Usage
from jaxctx.v1.context_service_pb2 import GenerateResponse

ContextT = TypeVar("ContextT", covariant=True)
OutputT = TypeVar("OutputT")

# After these errors the server may still work on the call, for at most one step of the engine. Only asyncio tasks are
# ended by the last of them.
CUT_SHORT = (DeadlineExceeded, Cancelled, Unavailable, asyncio.CancelledError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(GeneratePiece, Generic[ContextT]):
    """A part of one output; `str(piece)` is its text.

    `context` is the object that holds this output: the one generated from, or with n > 1 the output's own fork. The
    last piece of an output has `finish` and `seed`, and only then are the context's counters new. The first and the
    last one have `usage`.
    """

    context: ContextT  # type: ignore[assignment]  # a GeneratePiece has its counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(GeneratePiece, Generic[ContextT]):
    """A whole output; `str(completion)` is its text."""

    context: ContextT  # type: ignore[assignment]
    finish: FinishReason
    usage: Usage


def piece_from_proto(message: GenerateResponse, context: OutputT) -> Piece[OutputT]:
    """The piece that a response holds, with the object of its context."""
    return Piece(
        index=message.index,
        context_id=message.context_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple([convert.token_logprob_from_proto(each) for each in message.logprobs]),
        finish=convert.finish_reason_from_proto(message.finish),
        stop_match=convert.stop_match_from_proto(message),
        seed=message.seed if message.HasField("seed") else None,
        usage=convert.usage_from_proto(message.usage) if message.HasField("usage") else None,
        context=context,
    )


def join_pieces(index: int, pieces: list[Piece[OutputT]]) -> Completion[OutputT]:
    """All pieces of an output as one. Raises Internal if the output has no end."""
    last = pieces[-1] if pieces else None
    if last is None or last.finish is None or last.usage is None:
        raise Internal(f"the stream ended before output {index} did")
    return Completion(
        index=last.index,
        context_id=last.context_id,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        finish=last.finish,
        stop_match=last.stop_match,
        seed=last.seed,
        usage=last.usage,
        context=last.context,
    )
