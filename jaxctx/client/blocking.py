"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from jaxctx.client.clients import ClientSteps
from jaxctx.client.contexts import ContextSteps
from jaxctx.client.drive import blocking, blocking_items, run
from jaxctx.client.link import BLOCKING
from jaxctx.client.streams import Piece, Pieces


class Stream(Pieces["Context"], Iterator["Piece[Context]"]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    def __next__(self) -> Piece[Context]:
        piece = run(self._next_piece())
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Context(ContextSteps[Stream]):
    """A context on the server: its id, its counters as of the last answer, and what can be done with it.

    Made by `Client.create`, `Client.context`, `Client.open` and `fork`. Leaving its `with` block closes it; otherwise
    it lives on until `close`. One thread at a time; other clients may use the same context: of two writers one gets
    Aborted.
    """

    _stream = Stream

    fill = blocking(ContextSteps._fill)
    flush = blocking(ContextSteps._flush)
    complete = blocking(ContextSteps._complete)
    completions = blocking(ContextSteps._completions)
    forward = blocking(ContextSteps._forward)
    fork = blocking(ContextSteps._fork)
    truncate = blocking(ContextSteps._truncate)
    rewind = blocking(ContextSteps._rewind)
    reserve = blocking(ContextSteps._reserve)
    commit = blocking(ContextSteps._commit)
    release = blocking(ContextSteps._release)
    refresh = blocking(ContextSteps._refresh)
    tokens = blocking(ContextSteps._tokens)
    pages = blocking(ContextSteps._pages)
    ancestors = blocking(ContextSteps._ancestors)
    plan = blocking(ContextSteps._plan)
    compare = blocking(ContextSteps._compare)
    update = blocking(ContextSteps._update)
    save = blocking(ContextSteps._save)
    publish = blocking(ContextSteps._publish)
    close = blocking(ContextSteps._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run(self._leave(error))


class Client(ClientSteps[Context]):
    """A connection to a jaxctx server. Every method may raise the errors of `jaxctx.errors`.

    `target` is "host:port" or "unix:/path"; `credentials` (grpc.ssl_channel_credentials) switches TLS on. `timeout_s`
    is the deadline of calls that give none of their own (None: none); of `generate` it covers the whole stream. Calls
    that can be repeated safely are, a few times, while the server is unavailable. Leaving the `with` block closes the
    connection; contexts live on.
    """

    _transport = BLOCKING
    _context_class = Context

    create = blocking(ClientSteps._create)
    context = blocking(ClientSteps._context)
    contexts = blocking_items(ClientSteps._contexts)
    watch = blocking_items(ClientSteps._watch)
    plan = blocking(ClientSteps._plan)
    open = blocking(ClientSteps._open)
    take = blocking(ClientSteps._take)
    snapshot = blocking(ClientSteps._snapshot)
    snapshots = blocking_items(ClientSteps._snapshots)
    history = blocking(ClientSteps._history)
    update_snapshot = blocking(ClientSteps._update_snapshot)
    delete_snapshot = blocking(ClientSteps._delete_snapshot)
    publications = blocking(ClientSteps._publications)
    update_publication = blocking(ClientSteps._update_publication)
    unpublish = blocking(ClientSteps._unpublish)
    models = blocking(ClientSteps._models)
    model = blocking(ClientSteps._model)
    tokenize = blocking(ClientSteps._tokenize)
    detokenize = blocking(ClientSteps._detokenize)
    apply_chat_template = blocking(ClientSteps._apply_chat_template)
    engines = blocking(ClientSteps._engines)
    stats = blocking(ClientSteps._stats)
    drain = blocking(ClientSteps._drain)
    clear_cache = blocking(ClientSteps._clear_cache)
    close = blocking(ClientSteps._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
