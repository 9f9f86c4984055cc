# Generated from jaxctx/client/context.py by scripts/stubs. Not edited by hand.
"""What is known of a context, and what can be done with it; and its outputs as they come."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from jaxctx.client import requests
from jaxctx.client._sync.channel import AsyncCloseable, Channel
from jaxctx.client._sync.operations import ContextCalls
from jaxctx.client.options import GenerateOptions
from jaxctx.client.streams import CUT_SHORT, Completion, Piece, joined
from jaxctx.convert import decode
from jaxctx.errors import JaxctxError, NotFound
from jaxctx.types import Comparison, ContextInfo, ContextPages, ContextState, FillResult, GetContextResult

A = TypeVar("A")

# A writer that was cancelled lets go of its context within one step of the engine; until then it is BUSY. So the
# operation after one that was cut short first asks, with these pauses, until it is not.
SETTLE_PAUSES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Context(ContextCalls, AsyncCloseable):
    """A context on the server: its id, its counters as of the last answer, and what can be done with it.

    Made by `Client.create`, `Client.context`, `Client.open` and `fork`. Leaving its `with` block closes it;
    otherwise it lives on until `close`. One thread at a time; other clients may use the same context: of two writers
    one gets Aborted.
    """

    def __init__(self, link: Channel, context_id: str, info: ContextInfo | None = None) -> None:
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

    def generate(self, *, n: int = 1, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Continue the context; iterate over the pieces. Leaving the iteration early cancels the rest.

        With n > 1 this context is flushed and forked; pieces of the n outputs interleave and `piece.context` is the
        output's fork, which is the caller's to close.
        """
        request = self._link.request("Generate", context_id=self.id, n=n, **requests.said(options, GenerateOptions))
        return Stream(self, lambda: self._link.begin("Generate", request, timeout_s))

    def __repr__(self) -> str:
        known = "" if self._info is None else f" seq_len={self._info.seq_len} {self._info.state.value}"
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}{known}>"

    def complete(self, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Completion[Context]:
        """Continue the context and wait for the whole output."""
        return self.completions(1, timeout_s=timeout_s, **options)[0]

    def completions(
        self, n: int, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion[Context]]:
        """n outputs in the order of their indices, each in a fork of its own if n > 1."""
        pieces: dict[int, list[Piece[Context]]] = defaultdict(list)
        for piece in self.generate(n=n, timeout_s=timeout_s, **options):
            pieces[piece.index].append(piece)
        return [joined(index, pieces[index]) for index in range(n)]

    def fork(
        self, n: int | None = None, *, ids: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> list[Context]:
        """n children (default: one, or one per id) that begin as this context stands now. All or none."""
        forks = self._write("Fork", timeout_s, n=n, child_ids=ids)
        return [self._another(each.context_id, decode(each, ContextInfo)) for each in forks]

    def refresh(self, *, timeout_s: float | None = None) -> ContextInfo:
        """Ask for the counters."""
        return self._get(timeout_s).context

    def tokens(self, *, timeout_s: float | None = None) -> list[int]:
        """All tokens, buffered ones at the end."""
        told = self._get(timeout_s, include_tokens=True).tokens
        return list(told.ids) if told else []

    def pages(self, *, timeout_s: float | None = None) -> ContextPages:
        """The physical pages."""
        return self._get(timeout_s, include_pages=True).pages or ContextPages()

    def ancestors(self, *, timeout_s: float | None = None) -> list[tuple[str, int]]:
        """The way up the fork tree, its parent first: ids, closed ones too, and the tokens that each had then."""
        return list(self._get(timeout_s, include_ancestors=True).ancestors)

    def compare(self, other: Context | str, *, timeout_s: float | None = None) -> Comparison:
        """Where this context (a) and another one (b), or one of that id, part."""
        b = getattr(other, "id", other)  # of a context of the other client too
        return self._link.ask("Compare", timeout_s, Comparison, a=self.id, b=b)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Give up the context; a running writer is cancelled. Closing twice, or what is gone already, is no error."""
        if self._closed:
            return
        with contextlib.suppress(NotFound):
            self._link.call("CloseContext", timeout_s, context_id=self.id)
        self._closed = True

    def _write(self, method: str, timeout_s: float | None, /, **fields: Any) -> Any:
        self._settle()
        try:
            return self._link.call(method, timeout_s, context_id=self.id, **fields)
        except CUT_SHORT:
            self.cut_short = True
            raise

    def _change(self, method: str, timeout_s: float | None, kind: type[A], /, **fields: Any) -> A:
        """As `_write`, with an answer of this class; the counters that it brings are the newest."""
        answer = decode(self._write(method, timeout_s, **fields), kind)
        if isinstance(info := getattr(answer, "context", answer), ContextInfo):
            self.learn(info)
        return answer

    def _another(self, context_id: str, info: ContextInfo | None = None) -> Self:
        return type(self)(self._link, context_id, info)

    def _settle(self) -> None:
        """After a call that was cut short: wait for a moment while the server still works on it."""
        if self.cut_short:
            self.cut_short = False
            for pause_s in SETTLE_PAUSES_S:
                self._get(None)
                if self.info.state is not ContextState.BUSY:
                    return
                time.sleep(pause_s)

    def _get(self, timeout_s: float | None, **wanted: bool) -> GetContextResult:
        told = self._link.ask("GetContext", timeout_s, GetContextResult, context_id=self.id, **wanted)
        self.learn(told.context)
        return told


class Stream(Iterator[Piece[Context]]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    def __init__(self, source: Context, begin: Callable[[], Any]) -> None:
        self._contexts = {source.id: source}
        self._source = source
        self._begin = begin
        self._ended = False
        # Begun here unless something must be waited for first, so that streams made one after the other run together.
        self._call = None if source.cut_short else begin()

    def __next__(self) -> Piece[Context]:
        if self._ended:
            raise StopIteration
        if self._call is None:
            self._source._settle()
            self._call = self._begin()
        try:
            response = self._source._link.read(self._call)
        except CUT_SHORT:
            self.close()
            raise
        except JaxctxError:
            self._ended = True
            raise
        if response is None:
            self._ended = True
            raise StopIteration
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end, gRPC or the event loop may be gone before us
            self.close()
