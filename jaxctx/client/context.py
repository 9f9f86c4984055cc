"""A context on the server: its counters, the operations on it, and its outputs as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self, Unpack

import grpc

from jaxctx import convert
from jaxctx.client import requests
from jaxctx.client.calls import Deadline
from jaxctx.client.channel import AsyncCloseable, Channel, RequestT, ResponseT
from jaxctx.client.options import ChatOptions, ForwardOutputOptions, GenerateOptions
from jaxctx.client.streams import CUT_SHORT, Completion, Piece, join_pieces, piece_from_proto
from jaxctx.errors import JaxctxError, NotFound
from jaxctx.types import (
    Comparison,
    ContextInfo,
    ContextPages,
    ContextState,
    FillResult,
    ForwardResult,
    GetContextResult,
    PlanResult,
    Publication,
    Snapshot,
)
from jaxctx.v1 import context_service_pb2, snapshot_service_pb2

# A writer that was cancelled releases its context within one step of the engine; until then the context is BUSY. So the
# operation after one that was cut short first polls the state, with these pauses, until it is not BUSY.
IDLE_POLL_PAUSES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CLOSE_TIMEOUT_S = 5.0  # for closing contexts of an operation that failed, whose caller waits for its error


class Context(AsyncCloseable):
    """A context on the server: its id, its counters as of the last answer, and the operations on it.

    Made by `Client.create`, `Client.context`, `Client.open`, `Client.take` and `fork`. Leaving its `async with` block
    closes it; otherwise it stays on the server until `close` or the end of its time to live.

    One task at a time. Other clients may use the same context: of two writers one gets Aborted.
    """

    def __init__(self, channel: Channel, context_id: str, info: ContextInfo | None = None) -> None:
        self.id = context_id
        self._channel = channel
        self._info = info
        self.cut_short = False  # a call ended before its answer; the server may still be busy with it
        self._closed = False
        self.opened: FillResult | None = None  # for a context from a snapshot: where its KV came from

    def __repr__(self) -> str:
        known = "" if self._info is None else f" seq_len={self._info.seq_len} {self._info.state.value}"
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}{known}>"

    # --- Counters as of the last answer

    @property
    def info(self) -> ContextInfo:
        """All counters as of the last answer.

        Raises RuntimeError for a fork whose first output is still being generated.
        """
        if self._info is None:
            raise RuntimeError(f"the counters of {self.id} come with the last piece of its output, or by refresh()")
        return self._info

    @property
    def seq_len(self) -> int:
        """Tokens whose KV is computed."""
        return self.info.seq_len

    @property
    def buffered_tokens(self) -> int:
        """Tokens known but not computed yet: deferred fills and the last sampled token."""
        return self.info.buffered_tokens

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.info.page_size

    @property
    def engine_id(self) -> str:
        """The engine that holds the context: behind a router the engine's address, else "local".

        It changes when the router moves the context. Empty: unknown.
        """
        return self.info.engine_id

    def learn(self, info: ContextInfo) -> ContextInfo:
        """Take newer counters."""
        self._info = info
        return info

    async def refresh(self, *, timeout_s: float | None = None) -> ContextInfo:
        """Ask the server for the counters."""
        return (await self._get(timeout_s)).context

    # --- Operations that write

    async def fill(
        self,
        text: str | None = None,
        *,
        defer: bool = False,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> FillResult:
        """Append text, tokens or messages, and compute whatever of it no cached page holds.

        Exactly one of `text`, `tokens` and `messages` is given.

        Args:
            text: Text of 1 byte to 2 MiB, tokenised on its own.
            defer: Only buffer the tokens; the next operation that computes takes them along.
            tokens: Token ids, used as they are.
            messages: Messages, written by the model's chat template; in a context that has tokens, as the next turns.
                Keys of each: `role`, `content`, and if need be `name`, `tool_calls` (a list of dicts with `id`, `name`
                and `arguments`, which is a dict or JSON text), `tool_call_id` and `reasoning`.
            chat_options: Tools and other options of `messages`.
            add_generation_prompt: Whether `messages` end with what opens an answer of the assistant. None: if the last
                role is "user" or "tool".
            add_special_tokens: Whether the tokenizer adds its special tokens (beginning of sequence) to `text`. None:
                if the context is empty.
            timeout_s: Deadline in seconds. None: the client's.
        """
        content = requests.content_fields(
            text, tokens, messages, add_generation_prompt, add_special_tokens, chat_options
        )
        request = requests.build_request(context_service_pb2.FillRequest, context_id=self.id, defer=defer, **content)
        response = await self._write(self._channel.contexts.Fill, request, timeout_s)
        result = convert.fill_result_from_proto(response)
        self.learn(result.context)
        return result

    async def flush(self, *, timeout_s: float | None = None) -> FillResult:
        """Compute whatever is buffered."""
        request = requests.build_request(context_service_pb2.FlushRequest, context_id=self.id)
        response = await self._write(self._channel.contexts.Flush, request, timeout_s)
        result = convert.flush_response_from_proto(response)
        self.learn(result.context)
        return result

    def generate(self, *, n: int = 1, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Continue the context; iterate over the pieces. Leaving the iteration early cancels the rest.

        With n > 1 this context is flushed and forked; pieces of the n outputs interleave and `piece.context` is the
        output's fork, which the caller closes. When the iteration is left early or fails, the server closes the forks
        of outputs that have not ended, and those whose output came to its end stay.
        """
        request = requests.build_request(
            context_service_pb2.GenerateRequest,
            context_id=self.id,
            n=n,
            **requests.output_fields("", requests.checked_options(options, GenerateOptions)),
        )
        return Stream(self, request, timeout_s)

    async def complete(
        self, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion[Context]:
        """Continue the context and wait for the whole output. Options are those of `generate`."""
        return (await self.completions(1, timeout_s=timeout_s, **options))[0]

    async def completions(
        self, n: int, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion[Context]]:
        """n outputs in the order of their indices, each in a fork of its own if n > 1. After an error no fork stays."""
        pieces: dict[int, list[Piece[Context]]] = defaultdict(list)
        try:
            async for piece in self.generate(n=n, timeout_s=timeout_s, **options):
                pieces[piece.index].append(piece)
            return [join_pieces(index, pieces[index]) for index in range(n)]
        except GeneratorExit:  # the caller is gone: there is no one to close them for
            raise
        except BaseException:
            last_pieces = [each[-1] for each in pieces.values()]
            await close_all([last.context for last in last_pieces if n > 1 and last.finish is not None])
            raise

    async def forward(
        self,
        tokens: Sequence[int],
        *,
        positions: Sequence[int] = (),
        masks: Sequence[Sequence[tuple[int, int]]] = (),
        keep_working: bool = False,
        outputs: Sequence[ForwardOutputOptions] = (),
        timeout_s: float | None = None,
    ) -> ForwardResult:
        """One pass over explicit tokens, positions and attention masks.

        All of it is done or, on any error, nothing; only after a deadline or a cancelled call may tokens be left in the
        context: `rewind` removes them.

        Args:
            tokens: Token ids; 1 to max_context_tokens of them.
            positions: The position of each token, 0 to max_context_tokens - 1. Empty: its index in the context.
            masks: For each token the indices that it attends to, as ranges (start, stop); up to 65,536 ranges
                together. Empty: each token attends to every token up to itself.
            keep_working: Full pages stay working pages, so that `truncate` can remove their tokens, until the next
                operation that computes.
            outputs: What to return of the distributions; up to 256, each for a different token.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            context_service_pb2.ForwardRequest,
            context_id=self.id,
            tokens=tokens,
            positions=positions,
            masks=requests.attention_masks(masks),
            keep_working=keep_working,
            outputs=requests.forward_outputs(outputs),
        )
        response = await self._write(self._channel.contexts.Forward, request, timeout_s)
        result = convert.forward_result_from_proto(response)
        self.learn(result.context)
        return result

    async def fork(
        self, n: int | None = None, *, ids: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> list[Context]:
        """n children (default: one, or one per id) that begin as this context stands now. All or none."""
        request = requests.build_request(context_service_pb2.ForkRequest, context_id=self.id, n=n, child_ids=ids)
        response = await self._write(self._channel.contexts.Fork, request, timeout_s)
        children = [convert.context_info_from_proto(child) for child in response.contexts]
        return [self._other_context(child.context_id, child) for child in children]

    async def truncate(self, tokens: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Drop trailing tokens that are in no committed page. Pages stay reserved.

        Raises OutOfRange for more tokens than are buffered and in working pages.
        """
        request = requests.build_request(context_service_pb2.TruncateRequest, context_id=self.id, tokens=tokens)
        response = await self._write(self._channel.contexts.Truncate, request, timeout_s)
        return self.learn(convert.context_info_from_proto(response.context))

    async def rewind(self, to: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Keep the first `to` tokens only, across committed pages, without computing.

        Raises OutOfRange for more tokens than the context has, buffered ones included.
        """
        request = requests.build_request(context_service_pb2.RewindRequest, context_id=self.id, to=to)
        response = await self._write(self._channel.contexts.Rewind, request, timeout_s)
        return self.learn(convert.context_info_from_proto(response.context))

    async def switch_adapter(self, adapter: str | None, *, timeout_s: float | None = None) -> ContextInfo:
        """Go on with the LoRA adapter of this name, or with none, from the present length on.

        The tokens that the context has, buffered ones too, stay those of their adapters and keep their KV. The first
        token that `generate` draws without a `fill` before it follows the last one of these, and is drawn by its
        adapter. `rewind` and `truncate` keep a switch at exactly the length that they leave, and take back those after
        it. `info.adapter_spans` says which adapter computes which tokens.

        Raises NotFound (ADAPTER_NOT_FOUND), FailedPrecondition for the 101st switch.
        """
        request = requests.build_request(context_service_pb2.SwitchAdapterRequest, context_id=self.id, adapter=adapter)
        response = await self._write(self._channel.contexts.SwitchAdapter, request, timeout_s)
        return self.learn(convert.context_info_from_proto(response.context))

    async def reserve(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Allocate so many more working pages, so that later operations do not wait for them.

        Waits for pages until the deadline. Raises ResourceExhausted at once for more than the pool has at all.
        """
        request = requests.build_request(context_service_pb2.ReservePagesRequest, context_id=self.id, pages=pages)
        response = await self._write(self._channel.contexts.ReservePages, request, timeout_s)
        return self.learn(convert.context_info_from_proto(response.context))

    async def commit(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Make the first so many working pages immutable and shareable.

        Raises FailedPrecondition (PAGE_NOT_FULL) for a partial page, OutOfRange for more pages than there are.
        """
        request = requests.build_request(context_service_pb2.CommitPagesRequest, context_id=self.id, pages=pages)
        response = await self._write(self._channel.contexts.CommitPages, request, timeout_s)
        return self.learn(convert.context_info_from_proto(response.context))

    async def release(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Give back the last so many working pages, with the tokens in them.

        Raises OutOfRange for more pages than there are.
        """
        request = requests.build_request(context_service_pb2.ReleasePagesRequest, context_id=self.id, pages=pages)
        response = await self._write(self._channel.contexts.ReleasePages, request, timeout_s)
        return self.learn(convert.context_info_from_proto(response.context))

    async def update(
        self,
        *,
        priority: int | None = None,
        pinned: bool | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        pin_s: float | None = None,
        timeout_s: float | None = None,
    ) -> ContextInfo:
        """Change priority, pin, time to live or labels. What is None stays as it is.

        Args:
            priority: -100 to 100; higher runs first.
            pinned: Whether the context is never evicted under memory pressure. More than the caller may pin raises
                ResourceExhausted (PIN_BUDGET).
            labels: All labels from now on.
            ttl_s: Seconds to live from now on; `math.inf`: for ever.
            sliding: Every use starts the time to live again; needs `ttl_s`.
            pin_s: Seconds to stay pinned from now on; above 0, up to 10 years; needs `pinned`. None: until unpinned.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            context_service_pb2.UpdateContextRequest,
            context_id=self.id,
            priority=priority,
            pinned=pinned,
            labels=requests.all_labels(context_service_pb2.UpdateContextRequest.Labels, labels),
            ttl=requests.time_to_live(ttl_s, sliding),
            pin_for=requests.duration_field("pin_for", pin_s),
        )
        response = await self._write(self._channel.contexts.UpdateContext, request, timeout_s)
        return self.learn(convert.context_info_from_proto(response.context))

    async def save(
        self,
        name: str,
        *,
        durable: bool | None = None,
        overwrite_version: int | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        attachment: bytes = b"",
        max_versions: int | None = None,
        timeout_s: float | None = None,
    ) -> Snapshot:
        """Save the context's present state as a snapshot. The context goes on as it is.

        Args:
            name: The snapshot's name. One that exists raises AlreadyExists, unless `overwrite_version` is given.
            durable: Return only when the snapshot would survive a loss of power; a server without a store raises
                FailedPrecondition (NO_STORE). Otherwise it is kept in memory until the server ends.
            overwrite_version: The latest version, which the new one replaces as the latest. It is kept as history; a
                server may have a limit, and then drops the oldest version. Any other number raises Aborted
                (VERSION_MISMATCH).
            ttl_s: Seconds to keep it; `math.inf`, or None: for ever.
            sliding: Every use starts the time to live again; needs `ttl_s`.
            labels: The caller's notes, with the limits of `Client.create`.
            attachment: Bytes of the caller's that are kept with the version and deleted with it, up to 4 MiB; see
                `Client.snapshot_content`.
            max_versions: How many versions of the name are kept, the new one included, if the server's limit is not
                lower; the oldest are dropped. None: as many as the server's limit allows.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            snapshot_service_pb2.SaveRequest,
            context_id=self.id,
            name=name,
            durable=durable,
            overwrite_version=overwrite_version,
            ttl=requests.time_to_live(ttl_s, sliding),
            labels=labels,
            attachment=attachment,
            max_versions=max_versions,
        )
        response = await self._write(self._channel.snapshots.Save, request, timeout_s)
        return convert.snapshot_from_proto(response.snapshot)

    async def publish(
        self,
        *,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Publication:
        """Let contexts of all tenants share the full pages of this context.

        Args:
            ttl_s: Seconds to publish it; `math.inf`, or None: until `Client.unpublish`.
            sliding: Every use starts the time to live again; needs `ttl_s`.
            labels: The caller's notes, with the limits of `Client.create`.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            snapshot_service_pb2.PublishRequest,
            context_id=self.id,
            ttl=requests.time_to_live(ttl_s, sliding),
            labels=labels,
        )
        response = await self._write(self._channel.snapshots.Publish, request, timeout_s)
        return convert.publication_from_proto(response.publication)

    # --- Operations that read

    async def plan(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> PlanResult:
        """What `fill` with the same arguments would find in the cache and need, without doing it."""
        content = requests.content_fields(
            text, tokens, messages, add_generation_prompt, add_special_tokens, chat_options
        )
        request = requests.build_request(context_service_pb2.PlanRequest, context_id=self.id, **content)
        response = await self._channel.call(self._channel.contexts.Plan, request, timeout_s)
        return convert.plan_result_from_proto(response)

    async def tokens(self, *, timeout_s: float | None = None) -> list[int]:
        """All tokens, buffered ones at the end."""
        tokens = (await self._get(timeout_s, include_tokens=True)).tokens
        return list(tokens.ids) if tokens else []

    async def pages(self, *, timeout_s: float | None = None) -> ContextPages:
        """The physical pages."""
        return (await self._get(timeout_s, include_pages=True)).pages or ContextPages()

    async def ancestors(self, *, timeout_s: float | None = None) -> list[tuple[str, int]]:
        """The contexts that this one was forked from, its parent first, closed ones too: id and tokens at the fork."""
        return list((await self._get(timeout_s, include_ancestors=True)).ancestors)

    async def compare(self, other: Context | str, *, timeout_s: float | None = None) -> Comparison:
        """Where this context (a) and another one (b), given as an object or by its id, diverge."""
        other_id = other if isinstance(other, str) else other.id  # a context of the other client works too
        request = requests.build_request(context_service_pb2.CompareRequest, a=self.id, b=other_id)
        response = await self._channel.call(self._channel.contexts.Compare, request, timeout_s)
        return convert.comparison_from_proto(response)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Close the context; a running writer is cancelled. Closing a closed or unknown context is no error."""
        if self._closed:
            return
        request = requests.build_request(context_service_pb2.CloseContextRequest, context_id=self.id)
        with contextlib.suppress(NotFound):
            await self._channel.call(self._channel.contexts.CloseContext, request, timeout_s)
        self._closed = True

    # --- How calls are made

    async def _write(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float | None,
    ) -> ResponseT:
        """Call a method that writes to this context, once the server is done with one that was cut short."""
        deadline = self._channel.deadline(timeout_s)
        await self._wait_until_idle(deadline)
        try:
            return await self._channel.call(method, request, deadline.remaining_s())
        except CUT_SHORT:
            self.cut_short = True
            raise

    async def _wait_until_idle(self, deadline: Deadline) -> None:
        """After a call that was cut short: wait, not long, while the server still works on it."""
        if not self.cut_short:
            return
        for pause_s in IDLE_POLL_PAUSES_S:
            await self._get(deadline.remaining_s())
            if self.info.state is not ContextState.BUSY:
                break
            await asyncio.sleep(deadline.at_most_s(pause_s))
        self.cut_short = False  # not if the state could not be asked for: then the next operation waits

    async def _get(
        self,
        timeout_s: float | None,
        *,
        include_pages: bool = False,
        include_tokens: bool = False,
        include_ancestors: bool = False,
    ) -> GetContextResult:
        request = requests.build_request(
            context_service_pb2.GetContextRequest,
            context_id=self.id,
            include_pages=include_pages,
            include_tokens=include_tokens,
            include_ancestors=include_ancestors,
        )
        response = await self._channel.call(self._channel.contexts.GetContext, request, timeout_s)
        result = convert.get_context_result_from_proto(response)
        self.learn(result.context)
        return result

    def _other_context(self, context_id: str, info: ContextInfo | None = None) -> Self:
        """The object of another context on the same channel."""
        return type(self)(self._channel, context_id, info)


class Stream(AsyncIterator[Piece[Context]]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    def __init__(self, source: Context, request: context_service_pb2.GenerateRequest, timeout_s: float | None) -> None:
        self._contexts = {source.id: source}
        self._source = source
        self._request = request
        self._timeout_s = timeout_s
        self._ended = False
        # Started here unless the source must become idle first, so that streams made one after the other run together.
        self._call = None if source.cut_short else self._start(timeout_s)

    def _start(self, timeout_s: float | None) -> Any:
        channel = self._source._channel
        return channel.start(channel.contexts.Generate, self._request, timeout_s)

    async def __anext__(self) -> Piece[Context]:
        if self._ended:
            raise StopAsyncIteration
        if self._call is None:
            deadline = self._source._channel.deadline(self._timeout_s)
            await self._source._wait_until_idle(deadline)
            self._call = self._start(deadline.remaining_s())
        try:
            response = await self._source._channel.read(self._call)
        except CUT_SHORT:
            self.close()
            raise
        except JaxctxError:
            self._ended = True
            raise
        if response is None:
            self._ended = True
            raise StopAsyncIteration
        context = self._contexts.get(response.context_id)
        if context is None:
            context = self._contexts[response.context_id] = self._source._other_context(response.context_id)
        if response.HasField("context"):
            context.learn(convert.context_info_from_proto(response.context))
        return piece_from_proto(response, context)

    def close(self) -> None:
        """Cancel the rest. Idempotent; nothing happens after the last piece."""
        if not self._ended:
            self._ended = True
            if self._call is not None:
                self._call.cancel()
                for context in self._contexts.values():  # the server may still be busy with them
                    context.cut_short = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end, gRPC or the event loop may be gone before us
            self.close()


async def close_all(contexts: Sequence[Context]) -> None:
    """Close contexts that no caller has heard of. What cannot be closed within CLOSE_TIMEOUT_S stays."""
    deadline = Deadline(CLOSE_TIMEOUT_S)
    for context in contexts:
        with contextlib.suppress(JaxctxError):
            await context.close(timeout_s=deadline.remaining_s())
