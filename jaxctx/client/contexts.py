"""What can be done with a context: each operation once, as a program for both clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from jaxctx.answers import (
    Comparison,
    ContextInfo,
    ContextPages,
    FillResult,
    ForwardResult,
    PlanResult,
    Publication,
    Snapshot,
)
from jaxctx.client import requests
from jaxctx.client.drive import Steps
from jaxctx.client.options import Content, GenerateOptions, KeepOptions, Output, Ranges, SaveOptions, UpdateOptions
from jaxctx.client.streams import Completion, Piece, Pieces, joined
from jaxctx.client.view import CUT_SHORT, ContextView
from jaxctx.codec import decode
from jaxctx.errors import AlreadyExists, JaxctxError, NotFound
from jaxctx.v1 import context_service_pb2 as pb

A = TypeVar("A")
Stream = TypeVar("Stream", bound=Pieces[Any])


class ContextSteps(ContextView[Stream]):
    """Every operation on a context, as the steps that either client takes: `_fill` is what `fill` does."""

    def _fill(
        self,
        text: str | None = None,
        *,
        defer: bool = False,
        timeout_s: float | None = None,
        **content: Unpack[Content],
    ) -> Steps[FillResult]:
        """Append a text, `tokens` or `messages`, and compute what no cached page holds; with `defer` only buffer it.

        `add_special_tokens`, `add_generation_prompt` and their defaults: FillRequest and ChatMessages.
        """
        fields = requests.content(text, content)
        return self._change(self._link.contexts.Fill, timeout_s, FillResult, "", defer=defer, **fields)

    def _flush(self, *, timeout_s: float | None = None) -> Steps[FillResult]:
        """Compute whatever is buffered."""
        return self._change(self._link.contexts.Flush, timeout_s, FillResult, "")

    def _complete(
        self, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Steps[Completion[Self]]:
        """Continue the context and wait for the whole output."""
        (output,) = yield from self._completions(1, timeout_s=timeout_s, **options)
        return output

    def _completions(
        self, n: int, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Steps[list[Completion[Self]]]:
        """n outputs in the order of their indices, each in a fork of its own if n > 1."""
        pieces: dict[int, list[Piece[Self]]] = defaultdict(list)
        stream = self.generate(n, timeout_s=timeout_s, **options)
        while (piece := (yield from stream._next_piece())) is not None:
            pieces[piece.index].append(piece)
        return [joined(index, pieces[index]) for index in range(n)]

    def _forward(
        self,
        tokens: Sequence[int],
        *,
        positions: Sequence[int] = (),
        masks: Sequence[Ranges] = (),
        keep_working: bool = False,
        outputs: Sequence[Output] = (),
        timeout_s: float | None = None,
    ) -> Steps[ForwardResult]:
        """One pass over tokens, which join the context, at positions and seeing indices of the caller's choice.

        `positions` and `masks` are of all tokens or of none: ForwardRequest. On an error nothing of it stays; after a
        deadline, or when cancelled, what was computed by then does.
        """
        return self._change(
            self._link.contexts.Forward,
            timeout_s,
            ForwardResult,
            "",
            tokens=tokens,
            positions=positions,
            masks=[requests.mask(f"masks[{place}]", ranges) for place, ranges in enumerate(masks)],
            keep_working=keep_working,
            outputs=[requests.output(f"outputs[{place}]", output) for place, output in enumerate(outputs)],
        )

    def _fork(
        self, n: int | None = None, *, ids: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> Steps[list[Self]]:
        """n children (default: one, or one per id) that begin as this context stands now. All or none."""
        child_ids = ids
        if child_ids is None:  # chosen here, so that a retry cannot fork twice; whether n may be is the server's to say
            child_ids = [requests.new_id() for _ in range(min(n, 4096) if isinstance(n, int) else 1)]
        try:
            response = yield from self._write(self._link.contexts.Fork, timeout_s, n=n, child_ids=child_ids)
        except AlreadyExists:
            if ids is not None:
                raise
            # The ids are ours alone: the answer to our first attempt was lost.
            children = [self._another(child_id) for child_id in child_ids]
            for child in children:
                yield from child._refresh(timeout_s=timeout_s)
            return children
        return [self._another(each.context_id, decode(each, ContextInfo)) for each in response.contexts]

    def _truncate(self, tokens: int, *, timeout_s: float | None = None) -> Steps[ContextInfo]:
        """Drop trailing tokens that are in no committed page; OutOfRange past those."""
        return self._change(self._link.contexts.Truncate, timeout_s, ContextInfo, "context", tokens=tokens)

    def _rewind(self, to: int, *, timeout_s: float | None = None) -> Steps[ContextInfo]:
        """Keep the first `to` tokens, across committed pages, without computing."""
        return self._change(self._link.contexts.Rewind, timeout_s, ContextInfo, "context", to=to)

    def _reserve(self, pages: int, *, timeout_s: float | None = None) -> Steps[ContextInfo]:
        """Allocate that many more working pages, waiting for them if need be."""
        return self._change(self._link.contexts.ReservePages, timeout_s, ContextInfo, "context", pages=pages)

    def _commit(self, pages: int, *, timeout_s: float | None = None) -> Steps[ContextInfo]:
        """Make the first full working pages immutable and shareable; FailedPrecondition if one of them is partial."""
        return self._change(self._link.contexts.CommitPages, timeout_s, ContextInfo, "context", pages=pages)

    def _release(self, pages: int, *, timeout_s: float | None = None) -> Steps[ContextInfo]:
        """Give back working pages from the tail, with the tokens in them."""
        return self._change(self._link.contexts.ReleasePages, timeout_s, ContextInfo, "context", pages=pages)

    def _refresh(self, *, timeout_s: float | None = None) -> Steps[ContextInfo]:
        """Ask for the counters."""
        yield from self._get(timeout_s)
        return self.info

    def _tokens(self, *, timeout_s: float | None = None) -> Steps[list[int]]:
        """All tokens, buffered ones at the end."""
        response = yield from self._get(timeout_s, include_tokens=True)
        return list(response.tokens.ids)

    def _pages(self, *, timeout_s: float | None = None) -> Steps[ContextPages]:
        """The physical pages."""
        response = yield from self._get(timeout_s, include_pages=True)
        return decode(response.pages, ContextPages)

    def _ancestors(self, *, timeout_s: float | None = None) -> Steps[list[tuple[str, int]]]:
        """The way up the fork tree, its parent first: ids, closed ones too, and the tokens that each had then."""
        response = yield from self._get(timeout_s, include_ancestors=True)
        return [(each.context_id, each.forked_at) for each in response.ancestors]

    def _plan(
        self, text: str | None = None, *, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> Steps[PlanResult]:
        """What a fill with the same arguments would find in the cache and need, without doing it."""
        fields = requests.content(text, content)
        return self._link.ask(self._link.contexts.Plan, timeout_s, PlanResult, "", context_id=self.id, **fields)

    def _compare(self, other: ContextView[Any] | str, *, timeout_s: float | None = None) -> Steps[Comparison]:
        """Where this context (a) and another one (b), or one of that id, part."""
        b = other.id if isinstance(other, ContextView) else other
        return self._link.ask(self._link.contexts.Compare, timeout_s, Comparison, "", a=self.id, b=b)

    def _update(self, *, timeout_s: float | None = None, **options: Unpack[UpdateOptions]) -> Steps[ContextInfo]:
        """Change settings; what is not given stays as it is, `labels` replaces all labels."""
        fields = requests.settings(options, UpdateOptions, pb.UpdateContextRequest.Labels)
        return self._change(self._link.contexts.UpdateContext, timeout_s, ContextInfo, "context", **fields)

    def _save(self, name: str, *, timeout_s: float | None = None, **options: Unpack[SaveOptions]) -> Steps[Snapshot]:
        """Keep the present state under a name; with `durable` it survives the server. This context goes on.

        AlreadyExists for a name that is taken, unless `overwrite_version` is its latest version (else Aborted).
        """
        fields = requests.settings(options, SaveOptions)
        return self._change(self._link.snapshots.Save, timeout_s, Snapshot, "snapshot", name=name, **fields)

    def _publish(self, *, timeout_s: float | None = None, **options: Unpack[KeepOptions]) -> Steps[Publication]:
        """Let contexts of all tenants share the full pages, until `Client.unpublish`."""
        fields = requests.settings(options, KeepOptions)
        return self._change(self._link.snapshots.Publish, timeout_s, Publication, "publication", **fields)

    def _close(self, *, timeout_s: float | None = None) -> Steps[None]:
        """Give up the context; a running writer is cancelled. Closing twice, or what is gone already, is no error."""
        if self._closed:
            return
        with contextlib.suppress(NotFound):
            yield from self._call(self._link.contexts.CloseContext, timeout_s, context_id=self.id)
        self._closed = True

    def _leave(self, error: BaseException | None) -> Steps[None]:
        """At the end of a `with` block, which `error` ended."""
        try:
            yield from self._close()
        except JaxctxError:
            if error is None:  # else the error of the block is the one to see
                raise

    def _write(self, method: grpc.UnaryUnaryMultiCallable[Any, A], timeout_s: float | None, **fields: Any) -> Steps[A]:
        yield from self._settle()
        try:
            return (yield from self._call(method, timeout_s, context_id=self.id, **fields))
        except (*CUT_SHORT, asyncio.CancelledError):
            self.cut_short = True
            raise

    def _change(self, method: Any, timeout_s: float | None, kind: type[A], field: str, /, **fields: Any) -> Steps[A]:
        """As `_write`, with the answer of `Link.ask`; the counters that it brings are the newest."""
        response: Any = yield from self._write(method, timeout_s, **fields)
        answer = decode(getattr(response, field) if field else response, kind)
        if isinstance(info := getattr(answer, "context", answer), ContextInfo):
            self.learn(info)
        return answer
