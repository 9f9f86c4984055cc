"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from jaxctx.client.clients import ClientOperations
from jaxctx.client.contexts import ContextOperations
from jaxctx.client.drive import Blocking, run
from jaxctx.client.sessions import SessionOperations, VariableOperations
from jaxctx.client.streams import Piece, Pieces


class Stream(Pieces["Context"], Blocking, Iterator["Piece[Context]"]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    def __next__(self) -> Piece[Context]:
        piece = run(self._next_piece())
        if piece is None:
            raise StopIteration
        return piece


class Context(ContextOperations["Context", Stream], Blocking):
    """A context on the server: its id, its counters as of the last answer, and what can be done with it.

    Made by `Client.create`, `Client.context`, `Client.open` and `fork`. Leaving its `with` block closes it; otherwise
    it lives on until `close`. One thread at a time; other clients may use the same context: of two writers one gets
    Aborted.
    """

    _stream = Stream


class Variable(VariableOperations, Blocking):
    """A text of a session that is set once. Made by its session's methods."""


class Session(SessionOperations[Variable], Blocking):
    """A namespace of variables on the server, and calls that set them. Made by `Client.create_session`.

    Leaving its `with` block deletes it, and cancels what runs in it; otherwise it lives until it is not used for its
    time to live.
    """

    _variable_class = Variable


class Client(ClientOperations[Context, Session], Blocking):
    """A connection to a jaxctx server. Every method may raise the errors of `jaxctx.errors`.

    `target` is "host:port" or "unix:/path"; `credentials` (grpc.ssl_channel_credentials) switches TLS on. `timeout_s`
    is the deadline of calls that give none of their own (None: none); of `generate` it covers the whole stream. Calls
    that can be repeated safely are, a few times, while the server is unavailable. Leaving the `with` block closes the
    connection; contexts live on.
    """

    _transport = grpc
    _context_class = Context
    _session_class = Session
