"""Contexts of the asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio

from jaxctx.client import answers, kept, passes, requests
from jaxctx.client.aio.connection import Connection
from jaxctx.client.aio.stream import Stream
from jaxctx.client.kept import Publication, Snapshot
from jaxctx.client.link import SETTLE_PAUSES_S
from jaxctx.client.options import GenerateOptions, UpdateOptions
from jaxctx.client.outputs import Collector
from jaxctx.client.passes import ForwardResult, Output, Ranges
from jaxctx.client.requests import Content, Message
from jaxctx.client.types import (
    Comparison,
    Completion,
    ContextInfo,
    ContextPages,
    ContextState,
    FillResult,
    PlanResult,
)
from jaxctx.client.view import CUT_SHORT, ContextView, WithContext
from jaxctx.errors import AlreadyExists, JaxctxError, NotFound
from jaxctx.v1 import context_service_pb2 as pb

Q = TypeVar("Q")
A = TypeVar("A")
W = TypeVar("W", bound=WithContext)


class Context(ContextView):
    """A context on the server: its id, its counters as of the last answer, and what can be done with it.

    Made by `Client.create`, `Client.context`, `Client.open` and `fork`. Leaving its `async with` block closes it;
    otherwise it lives on until `close`. One task at a time; other clients may use the same context: of two writers one
    gets Aborted.
    """

    def __init__(self, connection: Connection, context_id: str, info: ContextInfo | None = None) -> None:
        super().__init__(context_id, info)
        self._connection = connection

    # --- tokens in and out -------------------------------------------------------------------------------------------

    async def fill(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        defer: bool = False,
        timeout_s: float | None = None,
    ) -> FillResult:
        """Append one of text, tokens and messages, and compute what no cached page holds; only buffer it with `defer`.

        The two flags and their defaults: FillRequest and ChatMessages.
        """
        content = Content(text, tokens, messages, add_special_tokens, add_generation_prompt)
        request = requests.fill(self.id, content, defer)
        response = await self._write(self._connection.contexts.Fill, request, timeout_s)
        return self._filled(response)

    async def flush(self, *, timeout_s: float | None = None) -> FillResult:
        """Compute whatever is buffered."""
        request = pb.FlushRequest(context_id=self.id)
        response = await self._write(self._connection.contexts.Flush, request, timeout_s)
        return self._filled(response)

    def generate(self, n: int = 1, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Continue the context; iterate over the pieces. Leaving the iteration early cancels the rest.

        With n > 1 this context is flushed and forked; pieces of the n outputs interleave and `piece.context` is the
        output's fork, which is the caller's to close.
        """
        request = requests.generate(self.id, n, options)
        return Stream(self, lambda: self._connection.stream(self._connection.contexts.Generate, request, timeout_s))

    async def complete(
        self, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion[Context]:
        """Continue the context and wait for the whole output."""
        return (await self.completions(1, timeout_s=timeout_s, **options))[0]

    async def completions(
        self, n: int, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion[Context]]:
        """n outputs in the order of their indices, each in a fork of its own if n > 1."""
        collector: Collector[Context] = Collector(n)
        async for piece in self.generate(n, timeout_s=timeout_s, **options):
            collector.add(piece)
        return collector.completions()

    async def forward(
        self,
        tokens: Sequence[int],
        *,
        positions: Sequence[int] = (),
        masks: Sequence[Ranges] = (),
        keep_working: bool = False,
        outputs: Sequence[Output] = (),
        timeout_s: float | None = None,
    ) -> ForwardResult:
        """One pass over tokens, which join the context, at positions and seeing indices of the caller's choice.

        `positions` and `masks` are of all tokens or of none: ForwardRequest. All of it or, on an error, nothing.
        """
        request = passes.forward(self.id, tokens, positions, masks, keep_working, outputs)
        result = passes.forward_result(await self._write(self._connection.contexts.Forward, request, timeout_s))
        self.learn(result.context)
        return result

    # --- shape -------------------------------------------------------------------------------------------------------

    async def fork(
        self, n: int | None = None, *, ids: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> list[Context]:
        """n children (default: one, or one per id) that begin as this context stands now. All or none."""
        request = requests.fork(self.id, n, ids)
        try:
            response = await self._write(self._connection.contexts.Fork, request, timeout_s)
        except AlreadyExists:
            if ids is not None:
                raise
            # The ids are ours alone: the answer to our first attempt was lost.
            children = [Context(self._connection, child_id) for child_id in request.child_ids]
            for child in children:
                await child.refresh(timeout_s=timeout_s)
            return children
        return [Context(self._connection, each.context_id, answers.context_info(each)) for each in response.contexts]

    async def truncate(self, tokens: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Drop trailing tokens that are in no committed page; OutOfRange past those."""
        request = requests.make(pb.TruncateRequest, context_id=self.id, tokens=tokens)
        return await self._change(self._connection.contexts.Truncate, request, timeout_s)

    async def rewind(self, to: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Keep the first `to` tokens, across committed pages, without computing."""
        request = requests.make(pb.RewindRequest, context_id=self.id, to=to)
        return await self._change(self._connection.contexts.Rewind, request, timeout_s)

    async def reserve(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Allocate that many more working pages, waiting for them if need be."""
        request = requests.make(pb.ReservePagesRequest, context_id=self.id, pages=pages)
        return await self._change(self._connection.contexts.ReservePages, request, timeout_s)

    async def commit(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Make the first full working pages immutable and shareable; FailedPrecondition if one of them is partial."""
        request = requests.make(pb.CommitPagesRequest, context_id=self.id, pages=pages)
        return await self._change(self._connection.contexts.CommitPages, request, timeout_s)

    async def release(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Give back working pages from the tail, with the tokens in them."""
        request = requests.make(pb.ReleasePagesRequest, context_id=self.id, pages=pages)
        return await self._change(self._connection.contexts.ReleasePages, request, timeout_s)

    # --- looking -----------------------------------------------------------------------------------------------------

    async def refresh(self, *, timeout_s: float | None = None) -> ContextInfo:
        """Ask for the counters."""
        return self._changed(await self._get(requests.make(pb.GetContextRequest, context_id=self.id), timeout_s))

    async def tokens(self, *, timeout_s: float | None = None) -> list[int]:
        """All tokens, buffered ones at the end."""
        response = await self._get(pb.GetContextRequest(context_id=self.id, include_tokens=True), timeout_s)
        self._changed(response)
        return list(response.tokens.ids)

    async def pages(self, *, timeout_s: float | None = None) -> ContextPages:
        """The physical pages."""
        response = await self._get(pb.GetContextRequest(context_id=self.id, include_pages=True), timeout_s)
        self._changed(response)
        return answers.context_pages(response.pages)

    async def plan(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        timeout_s: float | None = None,
    ) -> PlanResult:
        """What a fill with the same arguments would find in the cache and need, without doing it."""
        content = Content(text, tokens, messages, add_special_tokens, add_generation_prompt)
        request = requests.plan(content, context_id=self.id)
        return answers.plan_result(await self._connection.call(self._connection.contexts.Plan, request, timeout_s))

    async def compare(self, other: Context | str, *, timeout_s: float | None = None) -> Comparison:
        """Where this context (a) and another one (b), or one of that id, part."""
        request = requests.make(pb.CompareRequest, a=self.id, b=other.id if isinstance(other, Context) else other)
        return answers.comparison(await self._connection.call(self._connection.contexts.Compare, request, timeout_s))

    # --- life --------------------------------------------------------------------------------------------------------

    async def update(self, *, timeout_s: float | None = None, **options: Unpack[UpdateOptions]) -> ContextInfo:
        """Change settings; what is not given stays as it is, `labels` replaces all labels."""
        return await self._change(self._connection.contexts.UpdateContext, requests.update(self.id, options), timeout_s)

    async def save(
        self,
        name: str,
        *,
        durable: bool = False,
        overwrite_version: int | None = None,
        ttl_s: float | None = None,
        sliding: bool = False,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Snapshot:
        """Keep the present state under a name; with `durable` it survives the server. This context goes on.

        AlreadyExists for a name that is taken, unless `overwrite_version` is its latest version (else Aborted).
        """
        request = kept.save(self.id, name, durable, overwrite_version, ttl_s, sliding, labels)
        response = await self._write(self._connection.snapshots.Save, request, timeout_s)
        return kept.snapshot(response.snapshot)

    async def publish(
        self,
        *,
        ttl_s: float | None = None,
        sliding: bool = False,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Publication:
        """Let contexts of all tenants share the full pages, until `Client.unpublish`."""
        request = kept.publish(self.id, ttl_s, sliding, labels)
        response = await self._write(self._connection.snapshots.Publish, request, timeout_s)
        return kept.publication(response.publication)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Give up the context; a running writer is cancelled. Closing twice, or what is gone already, is no error."""
        if self._closed:
            return
        try:
            request = pb.CloseContextRequest(context_id=self.id)
            await self._connection.call(self._connection.contexts.CloseContext, request, timeout_s)
        except NotFound:
            pass
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except JaxctxError:
            if error is None:  # else the error of the block is the one to see
                raise

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _get(self, request: pb.GetContextRequest, timeout_s: float | None) -> pb.GetContextResponse:
        return await self._connection.call(self._connection.contexts.GetContext, request, timeout_s)

    async def _write(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, A], request: Q, timeout_s: float | None) -> A:
        await self._settle()
        try:
            return await self._connection.call(method, request, timeout_s)
        except (*CUT_SHORT, asyncio.CancelledError):
            self.cut_short = True
            raise

    async def _change(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Q, W], request: Q, timeout_s: float | None
    ) -> ContextInfo:
        response = await self._write(method, request, timeout_s)
        return self._changed(response)

    async def _settle(self) -> None:
        """After a call that was cut short: wait for a moment while the server still works on it."""
        if self.cut_short:
            self.cut_short = False
            for pause_s in SETTLE_PAUSES_S:
                if (await self.refresh()).state is not ContextState.BUSY:
                    return
                await asyncio.sleep(pause_s)
