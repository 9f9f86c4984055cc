"""The responses of one Generate call as pieces, and pieces as completions. Pure; the same for both clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from jaxctx.client import answers
from jaxctx.client.types import Completion, Piece
from jaxctx.client.view import ContextView
from jaxctx.errors import Internal
from jaxctx.v1 import context_service_pb2

V = TypeVar("V", bound=ContextView)


class Outputs(Generic[V]):
    """Turns responses into pieces: finds or makes the object of each output's context, and keeps its counters new."""

    def __init__(self, source: V, fork: Callable[[str], V]) -> None:
        self._contexts = {source.id: source}
        self._fork = fork

    def piece(self, response: context_service_pb2.GenerateResponse) -> Piece[V]:
        """The piece that a response is."""
        context = self._contexts.get(response.context_id)
        if context is None:
            context = self._contexts[response.context_id] = self._fork(response.context_id)
        if response.HasField("context"):
            context.learn(answers.context_info(response.context))
        return Piece(
            index=response.index,
            context=context,
            text=response.text,
            token_ids=tuple(response.token_ids),
            logprobs=answers.logprobs(response),
            finish=answers.finish(response),
            stop_match=answers.stop_match(response),
            seed=response.seed if response.HasField("seed") else None,
            usage=answers.usage(response.usage) if response.HasField("usage") else None,
        )

    def cut_short(self) -> None:
        """The call ended before its last piece: the server may hold the contexts for a moment longer."""
        for context in self._contexts.values():
            context.cut_short = True


class Collector(Generic[V]):
    """Joins the pieces of each of n outputs."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._pieces: dict[int, list[Piece[V]]] = defaultdict(list)

    def add(self, piece: Piece[V]) -> None:
        """The next piece, of whichever output."""
        self._pieces[piece.index].append(piece)

    def completions(self) -> list[Completion[V]]:
        """The outputs in the order of their indices. Raises Internal if one is missing or has no end."""
        return [_joined(index, self._pieces[index]) for index in range(self._n)]


def _joined(index: int, pieces: list[Piece[V]]) -> Completion[V]:
    last = pieces[-1] if pieces else None
    if last is None or last.finish is None or last.usage is None:
        raise Internal(f"the stream ended before output {index} did")
    return Completion(
        context=last.context,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        finish=last.finish,
        stop_match=last.stop_match,
        seed=last.seed,
        usage=last.usage,
    )
