"""What is known of a context, and what can be done with it: each operation once, as a program for both clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack

from jaxctx.answers import (
    Comparison,
    ContextInfo,
    ContextPages,
    ContextState,
    FillResult,
    GetContextResult,
    PlanResult,
)
from jaxctx.client import requests
from jaxctx.client.drive import operation, outcome
from jaxctx.client.link import Link
from jaxctx.client.options import Content, GenerateOptions
from jaxctx.client.streams import CUT_SHORT, Completion, Piece, Pieces, joined
from jaxctx.codec import decode
from jaxctx.errors import NotFound
from jaxctx.v1.operations import ContextCalls

A = TypeVar("A")
Context = TypeVar("Context")
Stream = TypeVar("Stream", bound=Pieces[Any])

# A writer that was cancelled lets go of its context within one step of the engine; until then it is BUSY. So the
# operation after one that was cut short first asks, with these pauses, until it is not.
SETTLE_PAUSES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class ContextOperations(ContextCalls, Generic[Context, Stream]):
    """A context's id, its counters as of the last answer, and every operation on it, as programs for either client.

    Those that are one call each are generated, and so are the counters. `Context` is that client's class.
    """

    _stream: Callable[..., Stream]  # makes one, of the context and what begins the call

    def __init__(self, link: Link, context_id: str, info: ContextInfo | None = None) -> None:
        self.id = context_id
        self._link = link
        self._info = info
        self.cut_short = False  # a call of ours ended before its answer; the server may be busy with it for a moment
        self._closed = False
        self.opened: FillResult | None = None  # of one from a snapshot: where its KV came from

    @property
    def info(self) -> ContextInfo:
        """The counters as of the last answer. RuntimeError for a fork whose first output is still being generated."""
        if self._info is None:
            raise RuntimeError(f"the counters of {self.id} come with the last piece of its output, or by refresh()")
        return self._info

    def learn(self, info: ContextInfo) -> ContextInfo:
        """Take newer counters."""
        self._info = info
        return info

    def generate(self, n: int = 1, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Continue the context; iterate over the pieces. Leaving the iteration early cancels the rest.

        With n > 1 this context is flushed and forked; pieces of the n outputs interleave and `piece.context` is the
        output's fork, which is the caller's to close.
        """
        request = requests.generate(self.id, n, options)
        return self._stream(self, lambda: self._link.begin("Generate", request, timeout_s))

    def __repr__(self) -> str:
        known = "" if self._info is None else f" seq_len={self._info.seq_len} {self._info.state.value}"
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}{known}>"

    @operation
    async def complete(
        self, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion[Context]:
        """Continue the context and wait for the whole output."""
        outputs: list[Completion[Context]] = await outcome(self.completions(1, timeout_s=timeout_s, **options))
        return outputs[0]

    @operation
    async def completions(
        self, n: int, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion[Context]]:
        """n outputs in the order of their indices, each in a fork of its own if n > 1."""
        pieces: dict[int, list[Piece[Context]]] = defaultdict(list)
        stream = self.generate(n, timeout_s=timeout_s, **options)
        while (piece := await stream._next_piece()) is not None:
            pieces[piece.index].append(piece)
        return [joined(index, pieces[index]) for index in range(n)]

    @operation
    async def fork(
        self, n: int | None = None, *, ids: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> list[Context]:
        """n children (default: one, or one per id) that begin as this context stands now. All or none."""
        forks = await self._write("Fork", timeout_s, n=n, child_ids=ids)
        return [self._another(each.context_id, decode(each, ContextInfo)) for each in forks]

    @operation
    async def refresh(self, *, timeout_s: float | None = None) -> ContextInfo:
        """Ask for the counters."""
        return (await self._get(timeout_s)).context

    @operation
    async def tokens(self, *, timeout_s: float | None = None) -> list[int]:
        """All tokens, buffered ones at the end."""
        told = (await self._get(timeout_s, include_tokens=True)).tokens
        return list(told.ids) if told else []

    @operation
    async def pages(self, *, timeout_s: float | None = None) -> ContextPages:
        """The physical pages."""
        return (await self._get(timeout_s, include_pages=True)).pages or ContextPages()

    @operation
    async def ancestors(self, *, timeout_s: float | None = None) -> list[tuple[str, int]]:
        """The way up the fork tree, its parent first: ids, closed ones too, and the tokens that each had then."""
        return list((await self._get(timeout_s, include_ancestors=True)).ancestors)

    @operation
    async def plan(
        self, text: str | None = None, *, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> PlanResult:
        """What a fill with the same arguments would find in the cache and need, without doing it."""
        fields = requests.content(text, content)
        return await self._link.ask("Plan", timeout_s, PlanResult, context_id=self.id, **fields)

    @operation
    async def compare(self, other: ContextOperations[Any, Any] | str, *, timeout_s: float | None = None) -> Comparison:
        """Where this context (a) and another one (b), or one of that id, part."""
        b = other.id if isinstance(other, ContextOperations) else other
        return await self._link.ask("Compare", timeout_s, Comparison, a=self.id, b=b)

    @operation
    async def close(self, *, timeout_s: float | None = None) -> None:
        """Give up the context; a running writer is cancelled. Closing twice, or what is gone already, is no error."""
        if self._closed:
            return
        with contextlib.suppress(NotFound):
            await self._link.call("CloseContext", timeout_s, context_id=self.id)
        self._closed = True

    async def _write(self, method: str, timeout_s: float | None, /, **fields: Any) -> Any:
        await self._settle()
        try:
            return await self._link.call(method, timeout_s, context_id=self.id, **fields)
        except (*CUT_SHORT, asyncio.CancelledError):
            self.cut_short = True
            raise

    async def _change(self, method: str, timeout_s: float | None, kind: type[A], /, **fields: Any) -> A:
        """As `_write`, with an answer of this class; the counters that it brings are the newest."""
        answer = decode(await self._write(method, timeout_s, **fields), kind)
        if isinstance(info := getattr(answer, "context", answer), ContextInfo):
            self.learn(info)
        return answer

    def _another(self, context_id: str, info: ContextInfo | None = None) -> Any:
        return type(self)(self._link, context_id, info)

    async def _settle(self) -> None:
        """After a call that was cut short: wait for a moment while the server still works on it."""
        if self.cut_short:
            self.cut_short = False
            for pause_s in SETTLE_PAUSES_S:
                await self._get(None)
                if self.info.state is not ContextState.BUSY:
                    return
                await outcome(self._link.sleep(pause_s))

    async def _get(self, timeout_s: float | None, **wanted: bool) -> GetContextResult:
        told = await self._link.ask("GetContext", timeout_s, GetContextResult, context_id=self.id, **wanted)
        self.learn(told.context)
        return told
