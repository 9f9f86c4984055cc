"""Contexts of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio

from jaxctx.client import answers, requests
from jaxctx.client.aio.connection import Connection
from jaxctx.client.link import SETTLE_PAUSES_S
from jaxctx.client.outputs import Collector, Outputs
from jaxctx.client.requests import Content, Message
from jaxctx.client.types import (
    Completion,
    ContextInfo,
    ContextPages,
    ContextState,
    FillResult,
    GenerateOptions,
    Piece,
    PlanResult,
)
from jaxctx.client.view import CUT_SHORT, ContextView, WithContext
from jaxctx.errors import AlreadyExists, JaxctxError, NotFound
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.wire import from_rpc_error

GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
Q = TypeVar("Q")
A = TypeVar("A")
W = TypeVar("W", bound=WithContext)


class Context(ContextView):
    """A context on the server: its id, its counters as of the last answer, and what can be done with it.

    Made by `Client.create`, `Client.context` and `fork`. Leaving its `async with` block closes it; otherwise it lives
    on until `close`. One task at a time; other clients may use the same context: of two writers one gets Aborted.
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

    # --- life --------------------------------------------------------------------------------------------------------

    async def update(
        self,
        *,
        priority: int | None = None,
        pinned: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ContextInfo:
        """Change settings; None leaves one as it is, `labels` replaces all labels."""
        request = requests.update(self.id, priority, pinned, labels)
        return await self._change(self._connection.contexts.UpdateContext, request, timeout_s)

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


class Stream(AsyncIterator[Piece[Context]]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    def __init__(self, source: Context, begin: Callable[[], GenerateCall]) -> None:
        self._source = source
        self._begin = begin
        self._ended = False
        self._outputs = Outputs(source, lambda context_id: Context(source._connection, context_id))
        # Begun here unless something must be awaited first, so that streams made one after the other run together.
        self._call = None if source.cut_short else begin()

    async def __anext__(self) -> Piece[Context]:
        if self._ended:
            raise StopAsyncIteration
        if self._call is None:
            await self._source._settle()
            self._call = self._begin()
        try:
            return self._outputs.piece(await anext(aiter(self._call)))
        except StopAsyncIteration:
            self._ended = True
            raise
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            self._ended = True
            if isinstance(error, CUT_SHORT):
                self._outputs.cut_short()
            raise error from rpc_error
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the rest. Idempotent; nothing happens after the last piece."""
        if not self._ended:
            self._ended = True
            if self._call is not None:
                self._outputs.cut_short()
                self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the event loop may be gone before us
            self.close()
