"""The asyncio client: the blocking one with `await`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Self

from jaxctx.client.clients import ClientSteps
from jaxctx.client.contexts import ContextSteps
from jaxctx.client.drive import asynchronous, asynchronous_items, run_async
from jaxctx.client.link import ASYNCIO
from jaxctx.client.streams import Piece, Pieces


class Stream(Pieces["Context"], AsyncIterator["Piece[Context]"]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    async def __anext__(self) -> Piece[Context]:
        piece = await run_async(self._next_piece())
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Context(ContextSteps[Stream]):
    """A context on the server: its id, its counters as of the last answer, and what can be done with it.

    Made by `Client.create`, `Client.context`, `Client.open` and `fork`. Leaving its `async with` block closes it;
    otherwise it lives on until `close`. One task at a time; other clients may use the same context: of two writers one
    gets Aborted.
    """

    _stream = Stream

    fill = asynchronous(ContextSteps._fill)
    flush = asynchronous(ContextSteps._flush)
    complete = asynchronous(ContextSteps._complete)
    completions = asynchronous(ContextSteps._completions)
    forward = asynchronous(ContextSteps._forward)
    fork = asynchronous(ContextSteps._fork)
    truncate = asynchronous(ContextSteps._truncate)
    rewind = asynchronous(ContextSteps._rewind)
    reserve = asynchronous(ContextSteps._reserve)
    commit = asynchronous(ContextSteps._commit)
    release = asynchronous(ContextSteps._release)
    refresh = asynchronous(ContextSteps._refresh)
    tokens = asynchronous(ContextSteps._tokens)
    pages = asynchronous(ContextSteps._pages)
    ancestors = asynchronous(ContextSteps._ancestors)
    plan = asynchronous(ContextSteps._plan)
    compare = asynchronous(ContextSteps._compare)
    update = asynchronous(ContextSteps._update)
    save = asynchronous(ContextSteps._save)
    publish = asynchronous(ContextSteps._publish)
    close = asynchronous(ContextSteps._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await run_async(self._leave(error))


class Client(ClientSteps[Context]):
    """A connection to a jaxctx server. Every method may raise the errors of `jaxctx.errors`.

    As `jaxctx.Client`, with `await`; made where an event loop runs. Leaving the `async with` block closes the
    connection; contexts live on.
    """

    _transport = ASYNCIO
    _context_class = Context

    create = asynchronous(ClientSteps._create)
    context = asynchronous(ClientSteps._context)
    contexts = asynchronous_items(ClientSteps._contexts)
    watch = asynchronous_items(ClientSteps._watch)
    plan = asynchronous(ClientSteps._plan)
    open = asynchronous(ClientSteps._open)
    take = asynchronous(ClientSteps._take)
    snapshot = asynchronous(ClientSteps._snapshot)
    snapshots = asynchronous_items(ClientSteps._snapshots)
    history = asynchronous(ClientSteps._history)
    update_snapshot = asynchronous(ClientSteps._update_snapshot)
    delete_snapshot = asynchronous(ClientSteps._delete_snapshot)
    publications = asynchronous(ClientSteps._publications)
    update_publication = asynchronous(ClientSteps._update_publication)
    unpublish = asynchronous(ClientSteps._unpublish)
    models = asynchronous(ClientSteps._models)
    model = asynchronous(ClientSteps._model)
    tokenize = asynchronous(ClientSteps._tokenize)
    detokenize = asynchronous(ClientSteps._detokenize)
    apply_chat_template = asynchronous(ClientSteps._apply_chat_template)
    engines = asynchronous(ClientSteps._engines)
    stats = asynchronous(ClientSteps._stats)
    drain = asynchronous(ClientSteps._drain)
    clear_cache = asynchronous(ClientSteps._clear_cache)
    close = asynchronous(ClientSteps._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
