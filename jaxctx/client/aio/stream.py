"""Streams of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from jaxctx.client.outputs import Outputs
from jaxctx.client.types import Piece
from jaxctx.client.view import CUT_SHORT
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.wire import from_rpc_error

if TYPE_CHECKING:  # a context makes streams, and a stream contexts
    from jaxctx.client.aio.context import Context

GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class Stream(AsyncIterator["Piece[Context]"]):
    """The pieces of a Generate call as they come. Closing it, or dropping it, cancels what has not come yet.

    After that the counters of its contexts are old: what was generated and not read may have joined them (`refresh`).
    """

    def __init__(self, source: Context, begin: Callable[[], GenerateCall]) -> None:
        self._source = source
        self._begin = begin
        self._ended = False
        self._outputs = Outputs(source, lambda context_id: type(source)(source._connection, context_id))
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
