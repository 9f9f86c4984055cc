"""Streams of the blocking client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import grpc

from jaxctx.client.blocking.connection import Responses
from jaxctx.client.outputs import Outputs
from jaxctx.client.types import Piece
from jaxctx.client.view import CUT_SHORT
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.wire import from_rpc_error

if TYPE_CHECKING:  # a context makes streams, and a stream contexts
    from jaxctx.client.blocking.context import Context


class Stream(Iterator["Piece[Context]"]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    def __init__(self, source: Context, call: Responses[pb.GenerateResponse]) -> None:
        self._source = source
        self._call = call
        self._ended = False
        self._outputs = Outputs(source, lambda context_id: type(source)(source._connection, context_id))

    def __next__(self) -> Piece[Context]:
        if self._ended:
            raise StopIteration
        try:
            return self._outputs.piece(next(self._call))
        except StopIteration:
            self._ended = True
            raise
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            self._ended = True
            if isinstance(error, CUT_SHORT):
                self._outputs.cut_short()
            raise error from rpc_error

    def close(self) -> None:
        """Cancel the rest. Idempotent; nothing happens after the last piece."""
        if not self._ended:
            self._ended = True
            self._outputs.cut_short()
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end, gRPC may be gone before us
            self.close()
